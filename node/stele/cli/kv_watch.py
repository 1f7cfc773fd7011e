"""`stele kv watch`: changes of keys, a line each, as they are committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from stele.cli.kv import as_json_fields
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import raw_output, say, show_json

if TYPE_CHECKING:
    from stele.client import AsyncClient, AsyncWatch, KeyChange

_LOOK_S, _PATIENCE_S = 0.2, 5.0
"""How often to check whether changes can come, and after how long to say that none can. An election takes less."""


@click.command()
@click.argument("keyspace")
@click.argument("key", required=False)
@click.option("--prefix", default=None, help="Watch the keys that begin with this.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=None,
    metavar="REVISION",
    help="Also print the changes after this revision [default: from now on].",
)
@masters_option
@json_option
def watch(
    keyspace: str, key: str | None, prefix: str | None, after: int | None, masters: str, as_json: bool
) -> None:
    """Print each change of KEY, or of all keys, until interrupted: revision, put or delete, key, value.

    Each change is printed once, in order. `stele kv list --json --revision` gives a revision for --after. If no change can
    come for some seconds, a line on standard error says so. Keys and values are printed as they are. If they have tabs or
    line ends, use --json.

    Example: stele kv watch settings --prefix col
    """
    if key is not None and prefix is not None:
        raise click.UsageError("give KEY or --prefix, not both")

    async def work(client: AsyncClient) -> None:
        space = await client.keyspace(keyspace)
        async with await space.watch(key, prefix=prefix, after=after) as changes:
            telling = asyncio.create_task(_tell(changes))
            try:
                async for write in changes:
                    for change in write.changes:
                        _show(change, as_json)
            finally:
                telling.cancel()

    with_client(masters, work)


async def _tell(watch: AsyncWatch) -> None:
    """Print once that no change can come, and once that changes can come again."""
    stalled_s, told = 0.0, False
    while True:
        await asyncio.sleep(_LOOK_S)
        why = watch.stalled_by
        stalled_s = stalled_s + _LOOK_S if why else 0.0
        if stalled_s >= _PATIENCE_S and not told:
            say(f"stele: no change can come at the moment: {why}; still trying", err=True)
            told = True
        elif told and not why:
            say("stele: watching again; no change was left out", err=True)
            told = False


def _show(change: KeyChange, as_json: bool) -> None:
    removed = change.value is None
    if as_json:
        said: dict[str, object] = {"revision": change.revision, **as_json_fields("key", change.key)}
        said |= {"deleted": True} if change.value is None else as_json_fields("value", change.value)
        show_json(said, one_line=True)
        return
    verb = b"delete" if removed else b"put"
    value = b"" if change.value is None else b"\t" + change.value
    out = raw_output()
    out.write(b"%d\t%b\t%b%b\n" % (change.revision, verb, change.key, value))
    out.flush()

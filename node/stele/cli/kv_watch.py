"""`stele kv watch`: changes of keys, a line each, as they are committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stele.cli.kv import as_json_fields
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import raw_output, show_json

if TYPE_CHECKING:
    from stele.client import AsyncClient, KeyChange


@click.command()
@click.argument("keyspace")
@click.argument("key", required=False)
@click.option("--prefix", default=None, help="Watch the keys that begin with this.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=None,
    metavar="REVISION",
    help="Print the changes behind this revision, too [default: from now on].",
)
@masters_option
@json_option
def watch(
    keyspace: str, key: str | None, prefix: str | None, after: int | None, masters: str, as_json: bool
) -> None:
    """Print each change of KEY, or of all keys, until interrupted: revision, put or delete, key, value.

    Each change is printed once, in order. `stele kv list --json --revision` gives a revision to begin behind.

    Example: stele kv watch settings --prefix col
    """
    if key is not None and prefix is not None:
        raise click.UsageError("give KEY or --prefix, not both")

    async def work(client: AsyncClient) -> None:
        space = await client.keyspace(keyspace)
        async with await space.watch(key, prefix=prefix, after=after) as changes:
            async for write in changes:
                for change in write.changes:
                    _show(change, as_json)

    with_client(masters, work)


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

"""`stele kv`: key spaces."""

from __future__ import annotations

import sys
from collections import Counter

import click

from stele.cli.errors import NO, error_line
from stele.cli.options import (
    json_option,
    lease_option,
    masters_option,
    replication_option,
    timeout_option,
    with_client,
)
from stele.cli.output import raw_output, say, show_done, show_json
from stele.model.errors import Code, Rejected


@click.command()
@click.argument("keyspace")
@replication_option()
@masters_option
@json_option
def create(keyspace: str, replication_factor: int, masters: str, as_json: bool) -> None:
    """Create a key space.

    Example: stele kv create settings
    """
    with_client(
        masters, lambda client: client.create_keyspace(keyspace, replication_factor=replication_factor)
    )
    show_done(
        f"created key space {keyspace}",
        as_json,
        {"name": keyspace, "replicationFactor": replication_factor},
    )


@click.command()
@click.argument("keyspace")
@click.argument("key")
@masters_option
@timeout_option
@json_option
@click.option(
    "--max-staleness",
    type=click.FloatRange(0.0),
    default=None,
    metavar="SECONDS",
    help="Read at a follower; the value may be this many seconds old.",
)
def get(
    keyspace: str, key: str, masters: str, timeout_s: float, as_json: bool, max_staleness: float | None
) -> None:
    """Print the value of KEY as of now; exit 1 if it is not there.

    Example: stele kv get settings colour
    """
    from stele.client import AsyncClient

    async def work(client: AsyncClient) -> bytes | None:
        space = await client.keyspace(keyspace)
        if max_staleness is None:
            return await space.read(key)
        found = await space.snapshot(key, max_staleness=max_staleness)
        say(f"this is the value of {found.age_s:.1f} s ago", err=True)
        return found.keys[0].value if found.keys else None

    value = with_client(masters, work, timeout_s)
    if value is None:
        say(f"stele: no key {key} in {keyspace}", err=True)
        sys.exit(NO)
    if as_json:
        show_json({**as_json_fields("key", key.encode()), **as_json_fields("value", value)})
    else:
        raw_output().write(value + b"\n")


@click.command()
@click.argument("keyspace")
@click.argument("key")
@click.argument("value")
@lease_option
@masters_option
@timeout_option
@json_option
def put(
    keyspace: str, key: str, value: str, lease: int | None, masters: str, timeout_s: float, as_json: bool
) -> None:
    """Set KEY to VALUE, whether KEY exists or not.

    Example: stele kv put settings colour blue
    """
    from stele.client import AsyncClient

    async def work(client: AsyncClient) -> int:
        return await (await client.keyspace(keyspace)).replace(key, value, lease=lease)

    _show_key(keyspace, key, with_client(masters, work, timeout_s), as_json)


@click.command()
@click.argument("keyspace")
@click.argument("key")
@click.argument("value")
@lease_option
@masters_option
@timeout_option
@json_option
def insert(
    keyspace: str, key: str, value: str, lease: int | None, masters: str, timeout_s: float, as_json: bool
) -> None:
    """Set KEY, which must not exist yet.

    Example: stele kv insert settings colour blue
    """
    from stele.client import AsyncClient

    async def work(client: AsyncClient) -> int:
        return await (await client.keyspace(keyspace)).insert(key, value, lease=lease)

    _show_key(keyspace, key, with_client(masters, work, timeout_s), as_json)


@click.command()
@click.argument("keyspace")
@click.option("--put", "puts", type=(str, str), multiple=True, metavar="KEY VALUE", help="Set a key.")
@click.option("--delete", "deletes", multiple=True, metavar="KEY", help="Remove a key, present or not.")
@click.option(
    "--when",
    "expected",
    type=(str, str),
    multiple=True,
    metavar="KEY VALUE",
    help="Only if a key has this value.",
)
@click.option("--when-absent", "absent", multiple=True, metavar="KEY", help="Only if there is no such key.")
@lease_option
@masters_option
@timeout_option
@json_option
def write(
    keyspace: str,
    puts: tuple[tuple[str, str], ...],
    deletes: tuple[str, ...],
    expected: tuple[tuple[str, str], ...],
    absent: tuple[str, ...],
    lease: int | None,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Change several keys at once, if others have the expected values. Else change nothing, and exit 1.

    Example: stele kv write settings --put colour red --delete old --when colour blue
    """
    from stele.client import AsyncClient

    changed = [*(key for key, _ in puts), *deletes]
    conditions = [*(key for key, _ in expected), *absent]
    _refuse_twice(changed, conditions)
    values = {**dict(puts), **dict.fromkeys(deletes)}
    when = {**dict(expected), **dict.fromkeys(absent)}

    async def work(client: AsyncClient) -> int:
        return await (await client.keyspace(keyspace)).write(values, when=when, lease=lease)

    try:
        revision = with_client(masters, work, timeout_s)
    except Rejected as exc:
        if exc.code is not Code.CAS_FAILED:
            raise
        say(f"stele: {error_line(exc)}", err=True)
        sys.exit(NO)
    if as_json:
        show_json({"keyspace": keyspace, "keys": changed, **_revision(revision)})


def _refuse_twice(changed: list[str], conditions: list[str]) -> None:
    """Refuse a key that is named twice: only one of the two could count."""
    faults = []
    for keys, what in ((changed, "to be changed"), (conditions, "as a condition")):
        faults += [f"{key} is named twice {what}" for key, count in Counter(keys).items() if count > 1]
    if faults:
        raise click.UsageError(f"{'; '.join(faults)}; name each key once")


@click.command()
@click.argument("keyspace")
@click.argument("key")
@masters_option
@timeout_option
@json_option
def delete(keyspace: str, key: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """Remove KEY. A key that does not exist is not an error.

    Example: stele kv delete settings colour
    """
    from stele.client import AsyncClient

    async def work(client: AsyncClient) -> int:
        return await (await client.keyspace(keyspace)).delete(key)

    _show_key(keyspace, key, with_client(masters, work, timeout_s), as_json)


@click.command(name="list")
@click.argument("keyspace")
@click.option("--prefix", default="", help="Only keys with this prefix.")
@click.option(
    "--revision",
    "with_revision",
    is_flag=True,
    help="With --json: one object, with the revision at which the keys were read, and that of each key.",
)
@masters_option
@timeout_option
@json_option
def list_keys(
    keyspace: str, prefix: str, with_revision: bool, masters: str, timeout_s: float, as_json: bool
) -> None:
    """Print keys and values in key order, separated by a tab.

    Example: stele kv list settings --prefix col
    """
    from stele.client import AsyncClient, KeySnapshot

    if with_revision and not as_json:
        raise click.UsageError("--revision needs --json")
    if with_revision:

        async def read(client: AsyncClient) -> KeySnapshot:
            return await (await client.keyspace(keyspace)).snapshot(prefix=prefix)

        state = with_client(masters, read, timeout_s)
        keys = [
            {**as_json_fields("key", k.key), **as_json_fields("value", k.value), "revision": k.revision}
            for k in state.keys
        ]
        show_json({"revision": state.revision, "keys": keys})
        return

    async def work(client: AsyncClient) -> list[tuple[bytes, bytes]]:
        return await (await client.keyspace(keyspace)).list(prefix)

    found = with_client(masters, work, timeout_s)
    if as_json:
        show_json([{**as_json_fields("key", key), **as_json_fields("value", value)} for key, value in found])
        return
    for key, value in found:
        raw_output().write(key + b"\t" + value + b"\n")


def _show_key(keyspace: str, key: str, revision: int, as_json: bool) -> None:
    """Print that a key was changed: one JSON object for programs, nothing for people."""
    if as_json:
        show_json({"keyspace": keyspace, "key": key, **_revision(revision)})


def _revision(revision: int) -> dict[str, int]:
    """A write's revision for programs; nothing if it is not known."""
    return {"revision": revision} if revision else {}


def as_json_fields(name: str, value: bytes) -> dict[str, str]:
    """A JSON field for bytes: `name` with the text. If they are not UTF-8, `name` + "Hex" with hex digits."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}Hex": value.hex()}

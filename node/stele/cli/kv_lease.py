"""`stele kv lease-grant`, `lease-keep`, `lease-revoke`, `leases`: keys that live as long as their holder is heard."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from stele.cli.errors import NO, error_line
from stele.cli.kv import as_json_fields
from stele.cli.options import json_option, lease_id, masters_option, timeout_option, with_client
from stele.cli.output import say, show_done, show_json, show_table
from stele.model.errors import Code, Rejected

if TYPE_CHECKING:
    from stele.client import AsyncClient, KeyLease


@click.command()
@click.argument("keyspace")
@click.option(
    "--ttl",
    "ttl_s",
    type=float,
    default=10.0,
    show_default=True,
    help="How long it lives unless it is kept alive, in seconds.",
)
@masters_option
@timeout_option
@json_option
def grant(keyspace: str, ttl_s: float, masters: str, timeout_s: float, as_json: bool) -> None:
    """Take a lease, and print its id. It ends after its time, unless `lease-keep` keeps it alive.

    Example: stele kv lease-grant settings --ttl 30
    """

    async def work(client: AsyncClient) -> int:
        lease = await (await client.keyspace(keyspace)).lease(ttl_s)
        await lease.close()
        return lease.id

    lease = f"{with_client(masters, work, timeout_s):016x}"
    show_done(lease, as_json, {"keyspace": keyspace, "lease": lease, "ttlS": ttl_s})


@click.command()
@click.argument("keyspace")
@click.argument("lease", type=lease_id)
@masters_option
@timeout_option
@json_option
def keep(keyspace: str, lease: int, masters: str, timeout_s: float, as_json: bool) -> None:
    """Keep a lease alive until interrupted. Exit 1 once it is lost.

    Example: stele kv lease-keep settings 5d1c9e0f3a72b846
    """

    async def work(client: AsyncClient) -> None:
        kept = await (await client.keyspace(keyspace)).keep_lease(lease)
        told = f"keeping lease {lease:016x}, of {kept.ttl_s:g} s, alive"
        if as_json:
            show_json({"lease": f"{lease:016x}", "ttlS": kept.ttl_s, "alive": True}, one_line=True)
        else:
            say(told)
        await kept.lost()
        raise Rejected(f"lease {lease:016x} is lost: {kept.lost_by}", code=Code.LEASE_LOST)

    said = ""
    try:
        with_client(masters, work, timeout_s)
    except Rejected as exc:
        if exc.code is not Code.LEASE_LOST:
            raise
        said = error_line(exc)
    if as_json:
        show_json({"lease": f"{lease:016x}", "alive": False}, one_line=True)
    say(f"stele: {said}", err=True)
    sys.exit(NO)


@click.command()
@click.argument("keyspace")
@click.argument("lease", type=lease_id)
@masters_option
@timeout_option
@json_option
def revoke(keyspace: str, lease: int, masters: str, timeout_s: float, as_json: bool) -> None:
    """End a lease and remove its keys. A lease that is gone is not an error.

    Example: stele kv lease-revoke settings 5d1c9e0f3a72b846
    """

    async def work(client: AsyncClient) -> None:
        await (await client.keyspace(keyspace)).revoke_lease(lease)

    with_client(masters, work, timeout_s)
    if as_json:
        show_json({"keyspace": keyspace, "lease": f"{lease:016x}"})


@click.command()
@click.argument("keyspace")
@masters_option
@timeout_option
@json_option
def leases(keyspace: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """List leases with their keys. `ttl`: how long one lives without a sign of its holder; `left`: how long it lives at least.

    Example: stele kv leases settings
    """

    async def work(client: AsyncClient) -> tuple[KeyLease, ...]:
        return await (await client.keyspace(keyspace)).leases()

    found = with_client(masters, work, timeout_s)
    if as_json:
        show_json(
            [
                {
                    "lease": f"{each.id:016x}",
                    "ttlS": each.ttl_s,
                    "leftS": each.left_s,
                    "keys": [as_json_fields("key", key) for key in each.keys],
                }
                for each in found
            ]
        )
        return
    rows = [
        (
            f"{each.id:016x}",
            f"{each.ttl_s:g}",
            f"{each.left_s:.1f}",
            ", ".join(key.decode("utf-8", "backslashreplace") for key in each.keys) or "-",
        )
        for each in found
    ]
    show_table(("lease", "ttl (s)", "left (s)", "keys"), rows)

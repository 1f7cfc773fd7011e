"""`stele cluster version`, `stele cluster finalize`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import confirm, say, short, show_done, show_json, show_table

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.driver.versions import ClusterVersions


@click.command()
@masters_option
@json_option
def version(masters: str, as_json: bool) -> None:
    """Show the finalized cluster version, and the release that each master and node runs.

    `reads`: the newest cluster version that the member reads. While one reads less than the others, formats stay as
    the earlier release has them, and that release may come back.

    Example: stele cluster version
    """
    from stele.client.admin import cluster_versions

    async def work(client: AsyncClient) -> ClusterVersions:
        return await cluster_versions(client.masters)

    found = with_client(masters, work)
    if as_json:
        show_json({**dataclasses.asdict(found), "possible": found.possible})
        return
    show_table(
        ("name", "id", "role", "release", "reads"),
        [(m.name or "-", short(m.node_id), m.role, m.release or "-", m.reads) for m in found.members],
        all_shown_by="stele cluster version --json",
    )
    say(f"cluster version {found.finalized} is finalized; {_next(found)}")


def _next(found: ClusterVersions) -> str:
    if found.possible > found.finalized:
        return f"all members read {found.possible}: `stele cluster finalize` ends the upgrade"
    if found.newest <= found.finalized:
        return "there is nothing to finalize"
    lagging = ", ".join(m.label for m in found.lagging[:5])
    more = f" and {len(found.lagging) - 5} more" if len(found.lagging) > 5 else ""
    return f"{found.newest} waits for {lagging}{more}"


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@masters_option
@timeout_option
@json_option
def finalize(yes: bool, masters: str, timeout_s: float, as_json: bool) -> None:
    """End an upgrade: allow formats and features that the release before cannot read.

    This cannot be undone: members of the release before are refused from then on. It is refused while a
    master or node is silent, or runs an earlier release; the message names it. Repeating it changes nothing.

    Example: stele cluster finalize
    """
    from stele.client.admin import finalize_version
    from stele.client.checks import check_finalize

    async def look(client: AsyncClient) -> ClusterVersions:
        return await check_finalize(client.masters, timeout_s=timeout_s)

    async def work(client: AsyncClient) -> int:
        return await finalize_version(client.masters, timeout_s=timeout_s)

    before = with_client(masters, look, timeout_s)
    if before.finalized < before.newest and not yes:
        confirm(
            f"Finalize cluster version {before.newest}? The release before cannot come back.",
            f"finalize cluster version {before.newest}",
        )
    now = with_client(masters, work, timeout_s)
    show_done(
        f"cluster version {now} is finalized" + (" already" if now == before.finalized else ""),
        as_json,
        {"finalized": now, "before": before.finalized},
    )

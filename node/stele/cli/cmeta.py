"""`stele local cmeta rewrite`: one replica on a volume that no process uses."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stele.cli.options import json_option
from stele.cli.output import say, short, show_done, show_json
from stele.cli.placing import owner
from stele.model.incarnation import shown

if TYPE_CHECKING:
    from stele.tserver.offline import Found

FLAG = "--accept-data-loss"


@click.group()
def cmeta() -> None:
    """The consensus metadata of one replica, on the volume of a stopped node or master."""


@cmeta.command()
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The data directory of the node or master, as for `node run`.",
)
@click.option("--tablet", default="", metavar="ID", help="The whole id of a tablet.  [default: the catalog]")
@click.option(FLAG, "accepted", is_flag=True, help="Do it. Without this option nothing is changed.")
@json_option
def rewrite(data_dir: Path, tablet: str, accepted: bool, as_json: bool) -> None:
    """Make the replica on a volume the only voter of its tablet, after a majority was lost for good.

    This recovers the catalog: run it on the volume of one master, and start that master. Without
    --accept-data-loss it only shows what the volume holds. Compare all volumes that are left, and choose the
    one whose log ends last. Rewrite one volume only: if two are rewritten, the masters later discard one. Rows
    that only the lost volumes had are lost. Lost volumes that return later are refused. Stop the process first.

    For a table's tablet use `stele tablet recover`, as long as a master leads.

    Example: stele local cmeta rewrite --data-dir /var/lib/stele/data
    """
    from stele.model.ids import is_id
    from stele.tserver import offline, volume

    if tablet and not is_id(tablet):
        raise click.UsageError(f"--tablet {tablet}: expected all 32 digits of its id")
    try:
        found = offline.look(data_dir, tablet)
        if as_json and not accepted:
            show_json({"found": _as_json(found), "rewritten": None})
        elif not as_json:
            _show(found)
        if not accepted:
            say(f"nothing was changed; to do it, add {FLAG}", err=as_json)
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        config = offline.rewrite(data_dir, tablet, now, owner())
    except volume.Fate as exc:
        raise click.UsageError(str(exc)) from None
    (peer,) = config.peers
    show_done(
        f"replica {peer.replica_id} is the only voter from entry {config.opid_index} on, incarnation "
        f"{shown(config.incarnation)}; start its process, and rewrite no other volume",
        as_json,
        {
            "found": _as_json(found),
            "rewritten": {
                "replica": int(peer.replica_id),
                "opidIndex": config.opid_index,
                "incarnation": shown(config.incarnation),
            },
        },
    )


def _show(found: Found) -> None:
    from stele.model.clock import physical_us, utc

    block = found.superblock
    newest = utc(physical_us(found.newest)) if found.newest else "unknown"
    say(
        f"{found.role} {found.node_id}: replica {block.replica_id} of tablet {block.tablet_id} "
        f"({block.table_name})"
    )
    say(
        f"  incarnation {shown(found.incarnation)}, term {found.term}, voted for {found.voted_for or 'nobody'}"
    )
    say(f"  log ends at {found.last_logged}, files hold all up to {found.flushed}, newest write {newest}")
    peers = ", ".join(
        f"{p.replica_id} on {short(p.node_id)} ({p.member_type.name})" for p in found.config.peers
    )
    say(f"  configuration {found.config.opid_index}: {peers}")
    say("  may be lost: writes that only the other voters have, acknowledged after that write")


def _as_json(found: Found) -> dict[str, Any]:
    block = found.superblock
    return {
        "node": found.node_id,
        "role": found.role,
        "tablet": block.tablet_id,
        "table": block.table_name,
        "replica": int(block.replica_id),
        "incarnation": shown(found.incarnation),
        "term": found.term,
        "votedFor": found.voted_for,
        "lastLogged": str(found.last_logged),
        "flushed": str(found.flushed),
        "newestWrite": str(found.newest) if found.newest else None,
        "opidIndex": found.config.opid_index,
        "peers": [
            {"replica": int(p.replica_id), "node": p.node_id, "memberType": p.member_type.name}
            for p in found.config.peers
        ],
    }

"""`stele tablet list`, `describe`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from stele.cli.health import cluster_health, names_of_nodes, warn_unsettled
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, short, show_json, show_table

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth
    from stele.rpc.proto import common_pb2, master_pb2


@click.command(name="list")
@click.option("--table", default="", help="Only tablets of this table.")
@masters_option
@json_option
def list_tablets(table: str, masters: str, as_json: bool) -> None:
    """List tablets with leaders and health.

    Example: stele tablet list --table flights
    """
    from stele.model.errors import Advice, Code, Rejected

    health: ClusterHealth = with_client(masters, cluster_health)
    if table and not any(t.table_name == table for t in health.tablets):
        raise Rejected(f"no table {table}", code=Code.NOT_FOUND, advice=Advice.LIST_TABLES)
    chosen = [t for t in health.tablets if not table or t.table_name == table]
    if as_json:
        show_json(
            [
                {
                    "tablet": t.tablet_id,
                    "table": t.table_name,
                    "state": t.state,
                    "leader": t.leader,
                    "load": t.load,
                }
                for t in chosen
            ]
        )
        return
    warn_unsettled(health)
    names = names_of_nodes(health)
    show_table(
        ("tablet", "table", "state", "leader", "voters", ""),
        [
            (
                short(t.tablet_id),
                t.table_name,
                t.state,
                names.get(t.leader, short(t.leader)) if t.led else "-",
                f"{t.voters_healthy}/{t.voters_wanted}",
                "; ".join(t.reasons),
            )
            for t in chosen
        ],
    )


@click.command()
@click.argument("tablet")
@masters_option
@json_option
def describe(tablet: str, masters: str, as_json: bool) -> None:
    """Show the replicas of one tablet. The first digits of its id are enough.

    The command asks the nodes what they have applied and stored. `reported` is "now", or the age of the last
    report to the masters if the node does not answer.

    Example: stele tablet describe 9a2e41
    """
    from stele.client.admin import cluster_view, tablet_called, tablet_now
    from stele.client.copies import copies_of
    from stele.client.health import examine

    async def work(
        client: AsyncClient,
    ) -> tuple[master_pb2.TabletViewPB, master_pb2.TabletViewPB, ClusterHealth, int]:
        cluster = await cluster_view(client.masters)
        found = tablet_called(tablet, cluster)
        health = examine(cluster)
        known = {node.node_id: node for node in health.nodes}
        return found, await tablet_now(client.pool, found, known), health, cluster.now_us

    view, now, health, now_us = with_client(masters, work)
    if as_json:
        show_json(_as_json(now) | {"copies": [copy.to_json() for copy in copies_of(view, now_us)]})
    else:
        _show(view, now, health, now_us)


def _show(
    view: master_pb2.TabletViewPB, now: master_pb2.TabletViewPB, health: ClusterHealth, now_us: int
) -> None:
    """Print a tablet. `view`: the masters' view, which ksck judges by; `now`: the view with fresh reports
    of its nodes. `now_us`: the masters' wall clock."""
    from stele.client.copies import copies_of
    from stele.client.health import member_faults, state_name
    from stele.rpc.proto import common_pb2

    known = {node.node_id: node for node in health.nodes}
    (tablet,) = (t for t in health.tablets if t.tablet_id == view.tablet_id.hex())
    leader = known[tablet.leader].label if tablet.led else "-"
    warn_unsettled(health)
    say(
        f"tablet {tablet.tablet_id} of {view.table_name}: {tablet.state}, term {view.term}, leader {leader}, "
        f"configuration {view.committed_config.opid_index}"
    )
    if view.HasField("by_hand"):
        names = names_of_nodes(health)
        say(f"placed by hand: {by_hand_in_words(view, names)}; `stele tablet release` cancels it")
    if view.HasField("recovery"):
        from stele.cli.recover import recovered_in_words

        say(recovered_in_words(view.recovery))
    for copy in copies_of(view, now_us):
        say(copy.in_words({node.node_id: node.label for node in health.nodes}))
    faults = member_faults(view, known)
    reports = {(r.node_id, r.status.replica_id): r for r in now.replicas}
    members = {(peer.node_id, peer.replica_id): peer for peer in view.committed_config.peers}
    rows = []
    for node_id, replica_id in [*members, *(key for key in reports if key not in members)]:
        node, peer, report = (
            known.get(node_id.hex()),
            members.get((node_id, replica_id)),
            reports.get((node_id, replica_id)),
        )
        kind = "no member"
        if peer is not None:
            kind = common_pb2.MemberTypePB.Name(peer.member_type) + (" (promote)" if peer.promote else "")
        status = report.status if report is not None else None
        row = [replica_id, node.label if node else short(node_id.hex()), kind, *"-----"]
        if status is not None and node is not None and node.state == "alive":
            row[3:5] = state_name(status), common_pb2.RolePB.Name(status.role)
        if report is not None:
            row[5:8] = _numbers(report)
        rows.append((*row, faults.get(replica_id, "") if peer is not None else _outside_state(status)))
    show_table(("replica", "node", "member", "state", "role", "applied", "bytes", "reported", ""), rows)


def by_hand_in_words(view: master_pb2.TabletViewPB, names: Mapping[str, str]) -> str:
    """Describe what was asked for a tablet's replicas by hand, by whom and why."""
    hand = view.by_hand

    def called(ids: Iterable[bytes]) -> str:
        return ", ".join(names.get(i.hex(), short(i.hex())) for i in ids)

    parts = [f"on {called(hand.pinned)}"] if hand.pinned else []
    parts += [f"not on {called(hand.avoided)}"] if hand.avoided else []
    parts += [f"{hand.extra} more than its table's factor"] if hand.extra else []
    since = datetime.datetime.fromtimestamp(hand.since_us // 1_000_000, datetime.UTC)
    who = f" by {hand.owner}" if hand.owner else ""
    why = f" ({hand.reason})" if hand.reason else ""
    return f"{', '.join(parts)}; asked for {since:%Y-%m-%d %H:%M} UTC{who}{why}"


def _numbers(report: master_pb2.ReplicaReportPB) -> tuple[str, str, str]:
    applied, age_s = report.status.last_applied, report.age_ms / 1_000
    reported = f"{age_s:,.1f} s ago" if report.age_ms else "now"
    return f"{applied.term}.{applied.index}", f"{report.status.bytes_on_disk:,}", reported


def _outside_state(status: common_pb2.ReplicaStatusPB | None) -> str:
    """The state of a replica outside the configuration: it is being copied, or was removed."""
    from stele.rpc.proto import common_pb2

    if status is None:
        return ""
    if status.HasField("copy"):
        error = f" ({status.copy.error})" if status.copy.error else ""
        return f"copying, {status.copy.bytes_done:,}/{status.copy.bytes_total:,} bytes{error}"
    return "was removed" if status.data_state == common_pb2.TOMBSTONED else status.error


def _as_json(message: Message) -> dict[str, Any]:
    """The message as protobuf's JSON, but with bytes in hex, as all commands print ids."""
    from google.protobuf.json_format import MessageToDict

    told: dict[str, Any] = MessageToDict(message)
    _in_hex(message, told)
    return told


def _in_hex(message: Message, told: dict[str, Any]) -> None:
    for field, value in message.ListFields():
        repeated = field.is_repeated
        if field.type == field.TYPE_BYTES:
            told[field.json_name] = [one.hex() for one in value] if repeated else value.hex()
        elif field.type == field.TYPE_MESSAGE:
            inner = told[field.json_name]
            for one, told_of_it in zip(value, inner) if repeated else [(value, inner)]:
                _in_hex(one, told_of_it)

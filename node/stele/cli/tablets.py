"""`stele tablet list`, `describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import short, show_json, show_table

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth
    from stele.rpc.proto import master_pb2


@click.command(name="list")
@click.option("--table", default="", help="Only of this table.")
@masters_option
@json_option
def list_tablets(table: str, masters: str, as_json: bool) -> None:
    """List tablets with leaders and health.

    Example: stele tablet list --table flights
    """
    from stele.client.health import examine
    from stele.model.errors import Advice, Code, Rejected

    health: ClusterHealth = examine(_view(masters))
    if table and not any(t.table_name == table for t in health.tablets):
        raise Rejected(f"no table {table}", code=Code.NOT_FOUND, advice=Advice.LIST_TABLES)
    chosen = [t for t in health.tablets if not table or t.table_name == table]
    if as_json:
        show_json(
            [
                {"tablet": t.tablet_id, "table": t.table_name, "state": t.state, "leader": t.leader}
                for t in chosen
            ]
        )
        return
    show_table(
        ("tablet", "table", "state", "leader", "voters", ""),
        [
            (
                t.tablet_id,
                t.table_name,
                t.state,
                short(t.leader),
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
    """Show the replicas of one tablet; its first digits will do.

    Example: stele tablet describe 9a2e41
    """
    from google.protobuf.json_format import MessageToDict

    from stele.client.health import examine
    from stele.model.errors import Code, Rejected
    from stele.rpc.proto import common_pb2

    cluster = _view(masters)
    known = {node.node_id: node.label for node in examine(cluster).nodes}
    found = [t for t in cluster.tablets if t.tablet_id.hex().startswith(tablet)]
    if len(found) != 1:
        raise Rejected(f"{len(found)} tablets begin with {tablet}; `stele tablet list`", code=Code.NOT_FOUND)
    view = found[0]
    if as_json:
        show_json(MessageToDict(view))
        return
    config = view.committed_config
    click.echo(
        f"tablet {view.tablet_id.hex()} of {view.table_name}: {view.state}, term {view.term}, "
        f"leader {known.get(view.leader_node.hex(), '-')}, configuration {config.opid_index}"
    )
    reports = {(r.node_id, r.status.replica_id): r.status for r in view.replicas}
    rows = []
    for peer in config.peers:
        node = known.get(peer.node_id.hex(), short(peer.node_id.hex()))
        status = reports.get((peer.node_id, peer.replica_id))
        kind = common_pb2.MemberTypePB.Name(peer.member_type) + (" (promote)" if peer.promote else "")
        if status is None:
            rows.append((peer.replica_id, node, kind, "not reported", "-", "-", "-", ""))
            continue
        rows.append(
            (
                peer.replica_id,
                node,
                kind,
                common_pb2.ReplicaStatePB.Name(status.state),
                common_pb2.RolePB.Name(status.role),
                f"{status.last_applied.term}.{status.last_applied.index}",
                f"{status.bytes_on_disk:,}",
                status.error,
            )
        )
    show_table(("replica", "node", "member", "state", "role", "applied", "bytes", ""), rows)


def _view(masters: str) -> master_pb2.GetClusterViewResponse:
    from stele.client.admin import cluster_view

    async def work(client: AsyncClient) -> master_pb2.GetClusterViewResponse:
        return await cluster_view(client.masters)

    return with_client(masters, work)

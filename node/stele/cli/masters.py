"""`stele master form`, `stele master list`, `stele master set-count`."""

from __future__ import annotations

import asyncio
import time

import click

from stele.cli.nodes import seen_in_words
from stele.cli.options import Shared, json_option, masters_option, with_client
from stele.cli.output import say, short, show_done, show_json, show_table
from stele.cli.replicas import follow, wait_option
from stele.model.amounts import plural


@click.command()
@click.option(
    "--masters",
    cls=Shared,
    envvar="STELE_MASTERS",
    required=True,
    metavar="HOST:PORT,...",
    help="All first masters (environment: STELE_MASTERS).",
)
@click.option(
    "--cluster-id", default="", metavar="HEX32", help="Fail if the masters belong to another cluster."
)
@click.option(
    "--wait", "wait_s", default=30.0, show_default=True, help="Seconds to wait for all of them to answer."
)
@json_option
def form(masters: str, cluster_id: str, wait_s: float, as_json: bool) -> None:
    """Form a new cluster: introduce its first masters to each other, once all have formatted their volumes.

    Until then none of them votes or serves. A cluster is formed once. Repeating the command does nothing
    while the same masters exist. It is refused after one of them was replaced.

    Example: stele master form --masters 10.0.0.1:7051,10.0.0.2:7051,10.0.0.3:7051
    """
    from stele.client.admin import form_masters
    from stele.model.errors import Retryable
    from stele.rpc.masters import parse_masters

    async def run() -> tuple[str, str]:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return await form_masters(parse_masters(masters), cluster_id=cluster_id)
            except Retryable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    formed, fork_id = asyncio.run(run())
    show_done(
        f"formed cluster {short(formed)}" + (f" under fork id {short(fork_id)}" if fork_id else ""),
        as_json,
        {"cluster": formed, "fork": fork_id or None},
    )


@click.command()
@masters_option
@json_option
def list_masters(masters: str, as_json: bool) -> None:
    """Show the masters and who leads. `seen`: live, or silent and for how long.

    Any master answers. While none of them leads, only ids and addresses are known, and the rest is shown as "-".

    Example: stele master list
    """
    from stele.client import AsyncClient
    from stele.client.admin import NodeStatus, list_nodes
    from stele.model.errors import Retryable
    from stele.rpc.convert import id_from_pb
    from stele.rpc.proto import master_pb2

    async def ask(client: AsyncClient) -> tuple[master_pb2.ListMastersResponse, list[NodeStatus]]:
        answer: master_pb2.ListMastersResponse = await client.masters.call(
            "ListMasters", master_pb2.ListMastersRequest(), timeout_s=5.0
        )
        try:
            return answer, await list_nodes(client.masters, timeout_s=5.0)
        except Retryable:  # nobody leads
            return answer, []

    answer, nodes = with_client(masters, ask)
    known = {node.node_id: node for node in nodes}
    rows = [
        (id_from_pb(m.node_id), m.address, m.node_id == answer.leader, known.get(id_from_pb(m.node_id)))
        for m in answer.masters
    ]
    if as_json:
        show_json(
            [
                {
                    **{"node": node, "address": address, "leads": leads},
                    **{key: getattr(at, key) if at else None for key in ("name", "machine", "zone", "seen")},
                }
                for node, address, leads, at in rows
            ]
        )
        return
    show_table(
        ("name", "id", "machine", "zone", "address", "seen", ""),
        [
            (
                *((at and at.name) or "-", short(node), (at and at.machine) or "-", (at and at.zone) or "-"),
                *(address, seen_in_words(at) if at else "-", "leader" if leads else ""),
            )
            for node, address, leads, at in rows
        ],
        all_shown_by="stele master list --json",
    )


@click.command()
@click.argument("count", type=click.Choice(["1", "3", "5"]))
@wait_option
@masters_option
@json_option
def set_count(count: str, wait: bool, wait_s: float, masters: str, as_json: bool) -> None:
    """Set how many masters the cluster has: 1, 3 or 5.

    To have more, first start them with `stele master run --join`, each on its own machine. A driver then gives each a copy
    of the catalog and then a vote, one at a time. To have fewer, name the smaller number: masters that are away or drained
    leave first, and the leader last. Then stop those that `stele master list` no longer shows. Where a TabletCluster
    describes the cluster, change its spec.masters.replicas instead.

    Example: stele master set-count 5 --wait
    """
    from stele.client import AsyncClient
    from stele.model.config import MemberType
    from stele.model.ids import CATALOG_TABLET_ID
    from stele.rpc.convert import config_from_pb, id_from_pb
    from stele.rpc.proto import master_pb2

    wanted = int(count)

    def far(view: master_pb2.GetClusterViewResponse) -> tuple[bool, str]:
        (catalog,) = [t for t in view.tablets if id_from_pb(t.tablet_id) == CATALOG_TABLET_ID]
        peers = config_from_pb(catalog.committed_config).peers
        voters = sum(p.member_type is MemberType.VOTER for p in peers)
        under_way = len(peers) - voters
        joining = f", {under_way} joining" if under_way else ""
        return voters == wanted and not under_way, f"{voters} of {wanted} masters{joining}"

    async def work(client: AsyncClient) -> None:
        answer = await client.masters.call("SetMasterCount", master_pb2.SetMasterCountRequest(masters=wanted))
        if answer.before == wanted:
            say(f"the cluster has {plural(wanted, 'master')} already", err=as_json)
        else:
            say(f"number of masters: {answer.before} becomes {wanted}", err=as_json)
        so_far = await follow(client, far, wait_s if wait else 0.0, err=as_json)
        if as_json:
            show_json({"before": answer.before, "masters": wanted, **so_far.as_json()})

    with_client(masters, work)

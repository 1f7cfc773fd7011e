"""`stele ksck`: checks the health of masters, nodes and tablets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click

from stele.cli.errors import NO, OK
from stele.cli.health import cluster_health, show_unhealthy, warn_unsettled
from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import say, short, show_json, show_table
from stele.model.amounts import byte_size, plural
from stele.model.ids import CATALOG_TABLET_ID

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth, NodeHealth


@click.command()
@masters_option
@json_option
@partial(timeout_option, default_s=10.0)
def ksck(masters: str, as_json: bool, timeout_s: float) -> None:
    """Check the cluster: masters, nodes, tablets, changes under way.

    Exit code 1 means NOT HEALTHY, WARNING or HIBERNATES. NOT HEALTHY: a tablet is not healthy. WARNING: a node is silent,
    its disk is nearly full so that it refuses writes, or its clock is wrong. Or a new replica holds other rows than another
    voter. A registered node that has never started ("new") is named, but it is not a fault: no tablet needs it.
    HIBERNATES: the TabletCluster hibernates or wakes, so tablets and nodes may be away.

    Example: stele ksck --masters 10.0.0.1:7051
    """

    async def work(client: AsyncClient) -> ClusterHealth:
        return await cluster_health(client, timeout_s=timeout_s)

    sys.exit(show(with_client(masters, work), as_json=as_json))


def show(health: ClusterHealth, *, as_json: bool = False) -> int:
    """Print the health; return the exit code."""
    if as_json:
        warnings = {
            "silent": [node.node_id for node in health.silent],
            "low_on_disk": [node.node_id for node in health.low_on_disk],
            "wrong_clocks": [node.node_id for node in health.wrong_clocks],
        }
        show_json({"healthy": health.healthy, **warnings, **asdict(health)})
    else:
        _print(health)
    warned = health.silent or health.low_on_disk or health.wrong_clocks or health.differing
    return OK if health.healthy and not warned else NO


def _print(health: ClusterHealth) -> None:
    by_id = {node.node_id: node for node in health.nodes}
    leader = by_id.get(health.leader_master)
    say(f"cluster {health.cluster_id}, leading master {leader.label if leader else '-'}")
    warn_unsettled(health)
    nodes = sorted(
        (node for node in health.nodes if node.state != "retired"), key=lambda n: (n.role, n.name, n.node_id)
    )
    named = any(node.name for node in nodes)
    columns: dict[str, Callable[[NodeHealth], str]] = {
        "name" if named else "node": lambda node: node.name if named else short(node.node_id),
        "role": lambda node: node.role,
        "state": lambda node: node.state,
        "wanted": lambda node: node.wanted,
        "heard": lambda node: node.heard,
        "replicas": lambda node: str(node.replicas),
        "disk free": lambda node: "" if node.disk_free_bytes is None else byte_size(node.disk_free_bytes),
        "address": lambda node: node.address,
        "machine": lambda node: node.machine,
        "zone": lambda node: node.zone,
    }
    if named:  # what people call it by stands first, so it is the last to be cut
        columns["node"] = lambda node: short(node.node_id)
    # Leave out columns without a value, as zones where there are none.
    shown = {head: cell for head, cell in columns.items() if any(cell(node) for node in nodes)}
    rows = [[cell(node) or "-" for cell in shown.values()] for node in nodes]
    show_table(tuple(shown), rows, all_shown_by="--json", whole=1)
    show_unhealthy(() if health.held else health.tablets)
    for node in () if health.held else health.silent:
        parked = "; it is parked, so its replicas wait for it" if node.wanted == "parked" else ""
        say(f"{node.role} {node.label} is silent: {node.heard}{parked}")
    for node in health.low_on_disk:
        say(f"{node.role} {node.label} {_low_disk_message(node)}")
    for node in health.wrong_clocks:
        say(f"{node.role} {node.label}: {node.clock_fault}; correct it with NTP")
    for difference in health.differing:
        say(difference)
    for node in health.new:
        pod = f"; `kubectl describe pod {node.name}` says what it waits for" if node.name else ""
        say(
            f"{node.role} {node.label} is registered but has never started; no tablet needs it, so this is not a fault{pod}"
        )
    for intent in health.intents:
        say(f"under way: {intent}")
    if health.holding or health.waiting:
        waiting = f"; {', '.join(health.waiting)} must wait" if health.waiting else ""
        say(f"change budget: held by {', '.join(health.holding) or 'nobody'}{waiting}")
    states = ("healthy", "under-replicated", "unavailable", "creating")
    counts = ", ".join(f"{health.count(s)} {s}" for s in states if health.count(s) or s == "healthy")
    say(f"{_counted(health)}: {counts}")
    if health.held and not (health.healthy and not health.silent):
        say(f"HIBERNATES: {health.held}; this is not a fault: tablets serve once it is awake")
    elif not health.healthy:
        say("NOT HEALTHY")
    elif health.silent or health.low_on_disk or health.wrong_clocks or health.differing:
        of = f"of {len(nodes)} nodes and masters"
        warnings = (
            ("silent", health.silent),
            ("low on disk", health.low_on_disk),
            ("with a wrong clock", health.wrong_clocks),
        )
        told = [f"{len(found)} {of} {fault}" for fault, found in warnings if found]
        if health.differing:
            told.append(f"{plural(len(health.differing), 'replica')} with other rows than another voter")
        say(f"WARNING: {', '.join(told)}, all tablets healthy")
    else:
        say("OK")


def _counted(health: ClusterHealth) -> str:
    """The number of tablets, with the catalog named apart, because kubectl counts only the tablets of
    tables."""
    of_tables = sum(t.tablet_id != CATALOG_TABLET_ID for t in health.tablets)
    tablets = f"{of_tables} tablet{'' if of_tables == 1 else 's'}"
    return f"{tablets} and the catalog" if of_tables < len(health.tablets) else tablets


def _low_disk_message(node: NodeHealth) -> str:
    free = f", {byte_size(node.disk_free_bytes)} are free" if node.disk_free_bytes is not None else ""
    meaning = (
        "while it leads, no table is created or changed, and nothing is healed"
        if node.role == "master"
        else "the tablets that it leads refuse writes (DISK_FULL), and it gets no new replica"
    )
    return f"refuses writes because its disk is nearly full{free}: {meaning}; enlarge its volume"

"""`stele plan`: shows what the loss of nodes, machines or zones would cost. Changes nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stele.cli.errors import NO, OK
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, short, show_json, show_table, size

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.driver.forecast import Affected, Forecast
    from stele.driver.view import ClusterView, NodeView
    from stele.model.ids import NodeId

_SHOWN_MAX = 10
_KINDS = ("node", "machine", "zone")


@click.command()
@click.option(
    "--lose",
    "lost",
    multiple=True,
    required=True,
    metavar="KIND/NAME",
    help="node/NAME (or the first digits of its id), machine/NAME or zone/NAME. May be given several times.",
)
@masters_option
@json_option
def plan(lost: tuple[str, ...], masters: str, as_json: bool) -> None:
    """Show what would happen if nodes, machines or zones were lost at once and for good.

    Nothing is changed. The answer comes from the driver's own planner. It lists the tablets that would stop,
    those that could lose no more, and the copies. It also says whether the other nodes have room. Exit code 1
    means that a tablet would stop, or would not become whole again by itself.

    Example: stele plan --lose machine/n2
    """
    from stele.client.admin import cluster_view
    from stele.driver.asking import ask_nodes
    from stele.driver.forecast import foretell, tablets_on
    from stele.driver.wire import standing_from_pb, view_from_pb
    from stele.model.errors import Code, Retryable
    from stele.model.ids import TabletId

    async def work(client: AsyncClient) -> tuple[Forecast, dict[str, str]]:
        answer = await cluster_view(client.masters)
        view = view_from_pb(answer)
        if not view.settled:
            raise Retryable(
                "the leader master is new and has not heard from all nodes yet; try again in a second",
                code=Code.NOT_READY,
            )
        names: dict[str, str] = {
            n.node_id: name for n, name in zip(view.nodes, (n.name for n in answer.nodes), strict=True)
        }
        gone = lost_nodes(lost, view, names)
        wanted: dict[str, list[TabletId]] = {}
        for tablet in tablets_on(view, gone):
            others = (p.node_id for p in tablet.config.peers if p.votes and p.node_id not in gone)
            source = tablet.leader_node or next(others, "")
            wanted.setdefault(source, []).append(tablet.tablet_id)
        view = await ask_nodes(client.pool, view, wanted)
        return foretell(view, standing_from_pb(answer.policy).policy(), gone), names

    forecast, names = with_client(masters, work)
    if as_json:
        show_json({"harmless": forecast.harmless, "bytes_copied": forecast.bytes_copied, **asdict(forecast)})
    else:
        _show(forecast, names)
    sys.exit(OK if forecast.harmless else NO)


def lost_nodes(words: Sequence[str], view: ClusterView, names: Mapping[str, str]) -> frozenset[NodeId]:
    """The nodes and masters that KIND/NAME words mean.

    Raises:
        UsageError: a word is not KIND/NAME.
        Rejected: NOT_FOUND, nothing has the name; with the nearest name.
    """
    from stele.driver.view import NodeState
    from stele.model.errors import Code, Rejected
    from stele.model.nearest import did_you_mean

    current = [n for n in view.nodes if n.state is not NodeState.RETIRED]
    found: set[NodeId] = set()
    for word in words:
        kind, _, name = word.partition("/")
        if kind not in _KINDS or not name:
            raise click.UsageError(f"--lose {word}: expected node/NAME, machine/NAME or zone/NAME")
        meant = {n.node_id for n in current if name in _called(kind, n, names)}
        if kind == "node" and not meant and len(name) >= 8:
            meant = {n.node_id for n in current if n.node_id.startswith(name)}
        if not meant:
            known = sorted({c for n in current for c in _called(kind, n, names)})
            raise Rejected(f"there is no {kind} {name}{did_you_mean(name, known)}", code=Code.NOT_FOUND)
        found |= meant
    return frozenset(found)


def _called(kind: str, node: NodeView, names: Mapping[str, str]) -> set[str]:
    match kind:
        case "node":
            return {names.get(node.node_id, ""), node.node_id} - {""}
        case "machine":
            return {node.host}
        case _:
            return {node.zone} - {""}


def _show(f: Forecast, names: Mapping[str, str]) -> None:
    def name(node_id: str) -> str:
        return names.get(node_id) or short(node_id)

    say(f"lost: {', '.join(f'{name(n.node_id)} ({n.role}, on {n.host})' for n in f.lost)}")
    say(f"{f.replicas} replicas are on them; {f.leaders} tablets would elect another leader within a second")
    if f.healing_stops:
        say(f"HEALING STOPS: {f.healing_stops}")
    _list("would stop, and serve nothing until a node is back", f.stopped)
    _list("would serve, but could lose no more voter until a new one votes", f.at_risk)
    if f.copies:
        took = "" if f.copying_s is None else f", in {_duration(f.copying_s)} at least"
        say(f"{len(f.copies)} replicas would be copied, {size(f.bytes_copied)}{took}:")
        to: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for copy in f.copies:
            to[copy.target_node] += copy.size_bytes
            count[copy.target_node] += 1
        rows = [(name(node), count[node], size(to[node])) for node in sorted(count, key=name)]
        show_table(("to", "replicas", "bytes"), rows)
    _list("would stay short of a replica", f.unhealed)
    if f.harmless:
        say("OK: every tablet keeps serving, and becomes whole again by itself")


def _list(what: str, tablets: Iterable[Affected]) -> None:
    found = list(tablets)
    if not found:
        return
    say(f"{len(found)} tablet{'' if len(found) == 1 else 's'} {what}:")
    for tablet in found[:_SHOWN_MAX]:
        say(f"  {short(tablet.tablet_id)} of {tablet.table_name}: {tablet.reason}")
    if len(found) > _SHOWN_MAX:
        say(f"  and {len(found) - _SHOWN_MAX} more; --json lists all")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5_400 else f"{seconds / 3600:.1f} h"

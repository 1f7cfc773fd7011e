"""`stele plan`: shows what the loss of nodes, machines or zones would cost, or what changed manifests would do.
Changes nothing.

Manifests are the operator's: its own program answers, because no package of the node imports the operator's.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from stele.cli.errors import NO, OK
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, short, show_json, show_table
from stele.model.amounts import byte_size, duration

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
    metavar="KIND/NAME",
    help="node/NAME (or the first digits of its id), machine/NAME or zone/NAME. May be given several times.",
)
@click.option(
    "-f",
    "--file",
    "manifests",
    metavar="FILE",
    help="Instead of --lose: changed manifests of a TabletCluster and its TabletGroups. The same as "
    "`stele-operator plan -f`, whose other options are not here.",
)
@masters_option
@json_option
@click.pass_context
def plan(
    ctx: click.Context, lost: tuple[str, ...], manifests: str | None, masters: str, as_json: bool
) -> None:
    """Show what would happen if nodes, machines or zones were lost at once and for good.

    Nothing is changed. The answer comes from the driver's own planner. It lists the tablets that would stop,
    those that could not lose another voter, and the copies. It also says whether the other nodes have room. Exit code 1
    means that a tablet would stop, or would not become whole again by itself.

    With -f it shows what changed manifests would do to a cluster on Kubernetes. It lists pods made again,
    nodes that come and go, replicas copied, and what would be refused.

    Examples: stele plan --lose machine/n2; stele plan -f new.yaml
    """
    if (manifests is None) == (not lost):
        raise click.UsageError("give either --lose KIND/NAME or -f FILE")
    if manifests is not None:
        given = ctx.get_parameter_source("masters") is not ParameterSource.DEFAULT
        sys.exit(_asked_of_operator(manifests, masters if given else "", as_json))
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
                "the leading master is new and has not heard from all nodes yet; try again in a second",
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


def _asked_of_operator(file: str, masters: str, as_json: bool) -> int:
    """Let the operator's program answer. Returns its exit code."""
    command = [sys.executable, "-P", "-m", "stele_operator", "plan", f"--file={file}"]
    command += [f"--masters={masters}"] if masters else []
    command += ["--json"] if as_json else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        say(line)
    for line in done.stderr.splitlines():
        say(line, err=True)
    return done.returncode


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
            none = "" if known else f"; no node has a {kind}"
            raise Rejected(f"there is no {kind} {name}{none}{did_you_mean(name, known)}", code=Code.NOT_FOUND)
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
    _list("would serve, but could not lose another voter until a new one votes", f.at_risk)
    if f.copies:
        took = "" if f.copying_s is None else f", in {duration(f.copying_s)} at least"
        when = " once healing goes on" if f.healing_stops else ""
        say(f"{len(f.copies)} replicas would be copied{when}, {byte_size(f.bytes_copied)}{took}:")
        to: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for copy in f.copies:
            to[copy.target_node] += copy.size_bytes
            count[copy.target_node] += 1
        rows = [(name(node), count[node], byte_size(to[node])) for node in sorted(count, key=name)]
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

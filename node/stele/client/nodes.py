"""Nodes for administrators: their state seen and wanted, and requests to drain, park and retire them.

Used by the command line; programs import it from `stele.client.admin`. Changes no configuration: a driver
carries the requests out. Invariant: a request that cannot be completed is refused before the masters record
it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stele.client.health import NodeHealth, examine
from stele.driver.feasible import absence, drain_faults
from stele.driver.keeping import pages_of, whole_view
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.progress import with_names
from stele.driver.steps import Blocked
from stele.driver.view import ClusterView, NodeState, Wanted
from stele.driver.wire import view_from_pb
from stele.model.bounds import WANTED_FOR_MAX_MS, cut
from stele.model.errors import Code, Rejected
from stele.model.nearest import did_you_mean
from stele.rpc.convert import id_from_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2

ID_DIGITS_MIN = 8
_WANTED = {
    Wanted.IN_SERVICE: master_pb2.WANTED_IN_SERVICE,
    Wanted.DRAINED: master_pb2.WANTED_DRAINED,
    Wanted.PARKED: master_pb2.WANTED_PARKED,
    Wanted.FENCED: master_pb2.WANTED_FENCED,
    Wanted.RETIRED: master_pb2.WANTED_RETIRED,
}


async def cluster_view(masters: Masters, *, timeout_s: float = 10.0) -> master_pb2.GetClusterViewResponse:
    """Nodes, tablets, intents and tables, from the leading master.

    Raises:
        SteleError: no master leads within `timeout_s`.
    """
    return await whole_view(pages_of(masters, timeout_s=timeout_s))


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node or master.

    `seen`: "live", "silent", or "never" if it never started. `heard`: when the leading master last heard it, in
    words. `wanted_by`: "administrator", "driver" or "". `wanted_left_s`: seconds until it returns to service by
    itself; None: it does not. `replicas`, `leaders`: of tablets, the catalog among them. `copies`: replicas
    that are being made on it. Bytes are None if it does not report its disk.
    """

    node_id: str
    name: str
    role: str
    machine: str
    zone: str
    address: str
    seen: str
    heard: str
    wanted: Wanted
    wanted_by: str
    wanted_reason: str
    wanted_left_s: float | None
    replicas: int
    leaders: int
    copies: int
    disk_used_bytes: int | None
    disk_free_bytes: int | None
    load: int | None = None
    """What clients ask of its leaders a second; None if it does not report it."""

    @property
    def label(self) -> str:
        """Its name, or the first digits of its id."""
        return self.name or self.node_id[:8]

    @property
    def empty(self) -> bool:
        """Whether no configuration and no change under way names it."""
        return not (self.replicas or self.copies)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that the masters recorded. `changed`: False if it was in force already. `notes`: what stops
    while the node is away."""

    node: NodeStatus
    changed: bool = True
    notes: tuple[str, ...] = ()


_SEEN = {"alive": "live", "silent": "silent", "new": "never", "retired": "retired"}


async def list_nodes(masters: Masters, *, timeout_s: float = 10.0) -> list[NodeStatus]:
    """All nodes and masters that are not retired, by role and name.

    Raises:
        SteleError: no master leads within `timeout_s`.
    """
    found = _statuses(await cluster_view(masters, timeout_s=timeout_s))
    return [n for n in found if n.seen != "retired"]


async def node_status_of(masters: Masters, given: str, *, timeout_s: float = 10.0) -> NodeStatus:
    """One node or master, also a retired one. `given`: as for `drain_node`."""
    view = await cluster_view(masters, timeout_s=timeout_s)
    wanted = id_from_pb(node_called(given, list(view.nodes)).node_id)
    return next(n for n in _statuses(view) if n.node_id == wanted)


async def what_drain_waits_for(masters: Masters, node_id: str, *, timeout_s: float = 10.0) -> tuple[str, ...]:
    """Why replicas stay on a node, as text, each reason once. Empty if nothing holds them up, or no driver is
    at work.

    A driver may know more, and may have a stricter policy.
    """
    pb = await cluster_view(masters, timeout_s=timeout_s)
    view = view_from_pb(pb)
    names = {id_from_pb(n.node_id)[:8]: n.name for n in pb.nodes if n.name}
    here = {t.tablet_id for t in view.tablets if t.config.peer_on(node_id) is not None}
    steps = await asyncio.to_thread(plan, view, Policy())
    waits = (s.reason for s in steps if isinstance(s, Blocked) and (not s.tablet_id or s.tablet_id in here))
    return tuple(dict.fromkeys(with_names(reason, names) for reason in waits))


async def drain_node(
    masters: Masters,
    given: str,
    *,
    reason: str = "",
    for_s: float | None = None,
    override: bool = False,
    timeout_s: float = 15.0,
) -> Answer:
    """Ask to move all leaders and replicas off a node. The node stays, and `undrain_node` cancels this.

    `given`: its name, its id, or at least the first eight digits of its id. `for_s`: after this many seconds it
    returns to service by itself. `override`: also change what a driver asked for.

    Raises:
        Rejected: NOT_FOUND; UNSAFE_CHANGE: other machines cannot take its replicas; INVALID_ARGUMENT: several
            nodes match, it is retired, or a driver asked for something else.
        Retryable: no master leads within `timeout_s`.
    """
    return await _leave(masters, given, Wanted.DRAINED, reason, for_s, override, timeout_s)


async def retire_node(
    masters: Masters, given: str, *, reason: str = "", override: bool = False, timeout_s: float = 15.0
) -> Answer:
    """Ask that a node be drained and then retired for good. Until it is empty, `undrain_node` cancels this.
    Arguments and errors as for `drain_node`."""
    return await _leave(masters, given, Wanted.RETIRED, reason, None, override, timeout_s)


async def undrain_node(
    masters: Masters, given: str, *, override: bool = False, timeout_s: float = 15.0
) -> Answer:
    """Cancel a drain: the node returns to service, and copies that were begun for it end.

    Raises:
        Rejected: as for `drain_node`; also if the node is parked or fenced.
    """
    return await _take_back(masters, given, (Wanted.DRAINED, Wanted.RETIRED), override, timeout_s)


async def park_node(
    masters: Masters,
    given: str,
    *,
    for_s: float,
    reason: str = "",
    override: bool = False,
    timeout_s: float = 15.0,
) -> Answer:
    """Let a node be away for this long: its replicas are not replaced or copied elsewhere.

    Leaders leave it first, and it gets nothing new. After the time it is treated like any node.

    Raises:
        Rejected: as for `drain_node`; UNSAFE_CHANGE: tablets would stop while it is away.
    """
    return await _keep(masters, given, Wanted.PARKED, for_s, reason, override, timeout_s)


async def fence_node(
    masters: Masters,
    given: str,
    *,
    for_s: float,
    reason: str = "",
    override: bool = False,
    timeout_s: float = 15.0,
) -> Answer:
    """Let a node run without serving anybody for this long: no clients and no other replicas.

    Its leaders move away first. Its replicas are not replaced or copied elsewhere. It stays fenced through
    its own restarts. After the time it is treated like any node.

    Raises:
        Rejected: as for `park_node`; also if it is a master.
    """
    return await _keep(masters, given, Wanted.FENCED, for_s, reason, override, timeout_s)


async def _keep(
    masters: Masters,
    given: str,
    wanted: Wanted,
    for_s: float,
    reason: str,
    override: bool,
    timeout_s: float,
) -> Answer:
    pb = await cluster_view(masters, timeout_s=timeout_s)
    node, view = node_called(given, list(pb.nodes)), view_from_pb(pb)
    away = absence(view, Policy(), {id_from_pb(node.node_id)})
    if wanted is Wanted.FENCED and status_in(pb, node).role == "master":
        raise Rejected(f"fence {_label(node)}: it is a master; only nodes can be fenced")
    if away.faults:
        verb = "park" if wanted is Wanted.PARKED else "fence"
        raise Rejected(f"{verb} {_label(node)}: {'; '.join(away.faults)}", code=Code.UNSAFE_CHANGE)
    await _want(masters, node, wanted, reason, for_s, override, timeout_s)
    return Answer(await _again(masters, node, timeout_s), notes=away.notes)


async def unpark_node(
    masters: Masters, given: str, *, override: bool = False, timeout_s: float = 15.0
) -> Answer:
    """Return a parked node to service: it is treated like any node again.

    Raises:
        Rejected: as for `drain_node`; also if the node drains or is fenced.
    """
    return await _take_back(masters, given, (Wanted.PARKED,), override, timeout_s)


async def unfence_node(
    masters: Masters, given: str, *, override: bool = False, timeout_s: float = 15.0
) -> Answer:
    """Return a fenced node to service: within seconds it serves like any node.

    Raises:
        Rejected: as for `drain_node`; also if the node drains or is parked.
    """
    return await _take_back(masters, given, (Wanted.FENCED,), override, timeout_s)


async def _leave(
    masters: Masters,
    given: str,
    wanted: Wanted,
    reason: str,
    for_s: float | None,
    override: bool,
    timeout_s: float,
) -> Answer:
    pb = await cluster_view(masters, timeout_s=timeout_s)
    node = node_called(given, list(pb.nodes))
    if node.wanted == _WANTED[wanted] and node.state == master_pb2.DRAINING and not (for_s or reason):
        return Answer(status_in(pb, node), changed=False)
    refuse_leaving(pb, node, wanted)
    await _want(masters, node, wanted, reason, for_s, override, timeout_s)
    return Answer(await _again(masters, node, timeout_s))


def refuse_leaving(
    pb: master_pb2.GetClusterViewResponse, node: master_pb2.NodeViewPB, wanted: Wanted
) -> None:
    """Raise UNSAFE_CHANGE if other machines cannot take the node's replicas."""
    view = view_from_pb(pb)
    if node.state != master_pb2.DRAINING and (faults := drain_faults(view, Policy(), _leaving(view, node))):
        verb = "drain" if wanted is Wanted.DRAINED else "retire"
        raise Rejected(f"{verb} {_label(node)}: {'; '.join(faults)}", code=Code.UNSAFE_CHANGE)


def _leaving(view: ClusterView, node: master_pb2.NodeViewPB) -> set[str]:
    """Return the node, and the nodes that drain already but still hold something. All their replicas need
    places."""
    draining = {n.node_id for n in view.nodes if n.state is NodeState.DRAINING and not n.given_up}
    return {id_from_pb(node.node_id), *draining}


_ENDED_BY = {
    Wanted.DRAINED: "it is being drained; use undrain",
    Wanted.RETIRED: "it is being drained; use undrain",
    Wanted.PARKED: "it is parked; use unpark",
    Wanted.FENCED: "it is fenced; use unfence",
}


async def _take_back(
    masters: Masters, given: str, wanted: Sequence[Wanted], override: bool, timeout_s: float
) -> Answer:
    """Return a node to service. `wanted`: the wanted states that this call may cancel."""
    pb = await cluster_view(masters, timeout_s=timeout_s)
    node = node_called(given, list(pb.nodes))
    status = status_in(pb, node)
    if status.seen == "retired":
        raise Rejected(f"{status.label} is retired, which is final; a new node needs a new volume")
    if status.wanted is Wanted.IN_SERVICE:
        return Answer(status, changed=False)
    if status.wanted not in wanted:
        raise Rejected(f"{status.label}: {_ENDED_BY[status.wanted]}")
    await _want(masters, node, Wanted.IN_SERVICE, "taken back", None, override, timeout_s)
    return Answer(await _again(masters, node, timeout_s))


async def _want(
    masters: Masters,
    node: master_pb2.NodeViewPB,
    wanted: Wanted,
    reason: str,
    for_s: float | None,
    override: bool,
    timeout_s: float,
) -> None:
    for_ms = round(for_s * 1_000) if for_s is not None else 0
    if for_s is not None and not 0 < for_ms <= WANTED_FOR_MAX_MS:
        raise Rejected(f"a time of {for_s:,} s; expected more than 0 and at most a year")
    request = master_pb2.WantNodeRequest(
        node_id=node.node_id, wanted=_WANTED[wanted], reason=cut(reason), for_ms=for_ms, override=override
    )
    await masters.call("WantNode", request, timeout_s=timeout_s)


async def _again(masters: Masters, node: master_pb2.NodeViewPB, timeout_s: float) -> NodeStatus:
    return status_in(await cluster_view(masters, timeout_s=timeout_s), node)


def status_in(pb: master_pb2.GetClusterViewResponse, node: master_pb2.NodeViewPB) -> NodeStatus:
    """A node of a view."""
    return next(n for n in _statuses(pb) if n.node_id == id_from_pb(node.node_id))


def _statuses(pb: master_pb2.GetClusterViewResponse) -> list[NodeStatus]:
    """All nodes and masters of a view, by role and name."""
    view = view_from_pb(pb)
    leaders = Counter(t.leader_node for t in view.tablets)
    copies = Counter(
        i.target_node
        for i in view.intents
        if (t := view.tablet(i.tablet_id)) is None or not t.config.names(i.replica_id, i.target_node)
    )
    seen: dict[str, NodeHealth] = {n.node_id: n for n in examine(pb).nodes}
    found = []
    for node in view.nodes:
        health = seen[node.node_id]
        told = node.disk_free_bytes or node.disk_used_bytes
        found.append(
            NodeStatus(
                node_id=node.node_id,
                name=health.name,
                role=health.role,
                machine=node.machine,
                zone=node.zone,
                address=node.address,
                seen=_SEEN.get(health.state, health.state),
                heard=health.heard,
                wanted=node.asked,
                wanted_by=node.wanted_by,
                wanted_reason=node.wanted_reason,
                wanted_left_s=node.wanted_left_ms / 1_000 if node.wanted_left_ms else None,
                replicas=node.replicas,
                leaders=leaders[node.node_id],
                copies=copies[node.node_id],
                disk_used_bytes=node.disk_used_bytes if told else None,
                disk_free_bytes=node.disk_free_bytes if told else None,
                load=node.load,
            )
        )
    return sorted(found, key=lambda n: (n.role, n.name, n.node_id))


async def forget_node(masters: Masters, given: str, *, timeout_s: float = 15.0) -> str:
    """Forget a node that is gone for good: it becomes RETIRED, nothing waits for it, and it is no longer
    shown.

    `given`: its name, its id, or at least the first eight digits of its id. Returns its name.

    Raises:
        Rejected: NOT_FOUND; INVALID_ARGUMENT: several nodes match; UNSAFE_CHANGE: it is alive, or a
            configuration or an intent names it.
        Retryable: no master leads after `timeout_s`, or the leader began only a moment ago.
    """
    view = await cluster_view(masters, timeout_s=timeout_s)
    node = node_called(given, list(view.nodes))
    request = master_pb2.SetNodeStateRequest(
        node_id=node.node_id,
        state=master_pb2.RETIRED,
        reason="an administrator says that it is gone",
        forget=True,
    )
    await masters.call("SetNodeState", request, timeout_s=timeout_s)
    return node.name or id_from_pb(node.node_id)


def _label(node: master_pb2.NodeViewPB) -> str:
    return node.name or id_from_pb(node.node_id)[:8]


def node_called(given: str, nodes: Sequence[master_pb2.NodeViewPB]) -> master_pb2.NodeViewPB:
    """The node of this name or id, or of an id that begins with at least eight such digits.

    Raises:
        Rejected: NOT_FOUND, none; INVALID_ARGUMENT, several.
    """
    digits = given.lower()
    found = [node for node in nodes if node.name == given] or [
        node for node in nodes if len(digits) >= ID_DIGITS_MIN and id_from_pb(node.node_id).startswith(digits)
    ]
    if not found:
        names = [node.name or id_from_pb(node.node_id) for node in nodes]
        hint = did_you_mean(given, names) or "; `stele node list` shows all"
        raise Rejected(f"no node is called {given!r}{hint}", code=Code.NOT_FOUND)
    if len(found) > 1:
        raise Rejected(f"{len(found)} nodes are called {given!r}; use the whole id of one")
    return found[0]

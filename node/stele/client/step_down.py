"""Moves the leader of a tablet by hand: an administrator's order, without the driver's claim.

Used by `stele tablet step-down`. Changes no configuration. The catalog's tablet is a tablet like others; its
leader is the leading master.

Invariant: drivers leave the leader where it was put, for the time that was asked for. The catalog has this
time before the leader moves.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from stele.client.admin import cluster_view, node_called
from stele.client.health import NodeHealth, examine
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

KEPT_S = 3_600
"""How long drivers leave a leader where it was moved by hand, by default."""
_ORDER_TIMEOUT_S = 5.0
_AGAIN_S = 0.2
_AGAIN = (Code.NOT_LEADER, Code.UNAVAILABLE, Code.CHANGE_IN_PROGRESS)
"""Codes after which the order is given again: another replica leads, or another transfer is under way."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a step-down: the nodes that led `before` and lead `after`, by name. Equal if it led
    already."""

    tablet_id: str
    table_name: str
    before: str
    after: str
    kept_s: int


async def step_down(
    masters: Masters,
    pool: ChannelPool,
    tablet: str,
    *,
    to: str = "",
    kept_s: int = KEPT_S,
    reason: str = "",
    timeout_s: float = 15.0,
) -> Moved:
    """Order the leader of a tablet to hand over to the node `to`, or to the best voter. Does nothing if `to`
    leads already.

    `tablet`: the first digits of its id. `kept_s`: how long no driver moves the leader; 0: it may at once.

    Raises:
        Rejected: NOT_FOUND; UNSAFE_CHANGE, the node cannot lead the tablet; INVALID_ARGUMENT, `kept_s` is too long.
        Retryable: NOT_READY, the node lacks much of the log, or nobody leads; TIMED_OUT, it did not take over.
    """
    deadline = time.monotonic() + timeout_s
    view = await cluster_view(masters, timeout_s=timeout_s)
    found = _tablet(tablet, view)
    known = {node.node_id: node for node in examine(view).nodes}
    target = id_from_pb(node_called(to, list(view.nodes)).node_id) if to else ""
    if target:
        _ensure_voter(found, target, known)
    call = _Call(masters, pool, found, known)
    before = await call.leader(deadline)
    if target and before == target:
        await call.keep(kept_s * 1_000)
        return Moved(
            id_from_pb(found.tablet_id), found.table_name, _name(target, known), _name(target, known), kept_s
        )
    kept_ms = max(0, found.leader_kept_until_us - view.now_us) // 1_000
    await call.keep(kept_s * 1_000)
    try:
        after = await call.move(before, target, reason, deadline)
    except SteleError:
        await call.keep(kept_ms)  # unchanged
        raise
    return Moved(
        id_from_pb(found.tablet_id), found.table_name, _name(before, known), _name(after, known), kept_s
    )


class _Call:
    """The calls about one tablet. `known`: the nodes, by id."""

    def __init__(
        self,
        masters: Masters,
        pool: ChannelPool,
        tablet: master_pb2.TabletViewPB,
        known: dict[str, NodeHealth],
    ) -> None:
        self._masters = masters
        self._pool = pool
        self._tablet = tablet
        self._known = known
        self._id = id_from_pb(tablet.tablet_id)

    async def keep(self, for_ms: int) -> None:
        """Record for how long drivers leave the leader where it is."""
        request = master_pb2.KeepLeaderRequest(tablet_id=self._tablet.tablet_id, for_ms=for_ms)
        await self._masters.call("KeepLeader", request)

    async def leader(self, deadline: float) -> str:
        """Return the node that says it leads in the newest term that any replica reports."""
        while True:
            peers = [id_from_pb(p.node_id) for p in self._tablet.committed_config.peers]
            told = await asyncio.gather(*(self._ask(n) for n in peers if n in self._known))
            leading = [(s.term, node) for node, s in told if s is not None and s.role == common_pb2.LEADER]
            newest = max((s.term for _, s in told if s is not None), default=0)
            if leading and max(leading)[0] == newest:
                return max(leading)[1]
            if time.monotonic() + _AGAIN_S > deadline:
                raise Retryable(
                    f"tablet {self._id}: no replica says that it leads; `stele tablet describe "
                    f"{self._id[:8]}` shows them",
                    code=Code.NOT_READY,
                )
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, node_id: str) -> tuple[str, common_pb2.ReplicaStatusPB | None]:
        request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[self._tablet.tablet_id])
        try:
            answer = await self._to_node(node_id, "GetConsensusState", request, 1.0)
        except SteleError:
            return node_id, None
        alive = [s for s in answer.replicas if s.data_state != common_pb2.TOMBSTONED]
        return node_id, max(alive, key=lambda s: s.replica_id, default=None)

    async def move(self, leader: str, target: str, reason: str, deadline: float) -> str:
        """Order the leader to hand over, and repeat the order while another node leads. Returns the node that
        leads in the end."""
        first = leader
        while True:
            request = consensus_pb2.LeaderStepDownRequest(
                tablet_id=self._tablet.tablet_id,
                target_node=id_to_pb(target),
                reason=reason or "asked for on the command line",
            )
            try:
                await self._to_node(leader, "LeaderStepDown", request, _ORDER_TIMEOUT_S)
                return target or await self.leader(deadline)
            except SteleError as exc:
                if exc.code not in (*_AGAIN, Code.TIMED_OUT) or time.monotonic() + _AGAIN_S > deadline:
                    raise self._explained(exc, target) from exc
                error = exc
            await asyncio.sleep(_AGAIN_S)
            leader = await self.leader(deadline)
            if leader == target or (not target and leader != first):
                return leader
            if error.code is Code.TIMED_OUT:  # writes waited for it, so do not try it again
                raise self._explained(error, target)

    def _explained(self, exc: SteleError, target: str) -> SteleError:
        name = _name(target, self._known) if target else "another node"
        text = (
            f"the leader of tablet {self._id} stays where it is, and does not move to {name}: {exc.args[0]}"
        )
        kind = Retryable if isinstance(exc, Retryable) else Rejected
        return kind(text, code=exc.code)

    async def _to_node(
        self, node_id: str, method: str, request: object, timeout_s: float
    ) -> consensus_pb2.GetConsensusStateResponse:
        answer: consensus_pb2.GetConsensusStateResponse = await self._pool.unary(
            self._known[node_id].address,
            ConsensusServiceStub,
            method,
            request,
            timeout_s=timeout_s,
            to_node=node_id,
        )
        return answer


def _tablet(given: str, view: master_pb2.GetClusterViewResponse) -> master_pb2.TabletViewPB:
    found = [t for t in view.tablets if given and t.tablet_id.hex().startswith(given.lower())]
    if len(found) == 1:
        return found[0]
    raise Rejected(
        f"{len(found)} tablets begin with {given or '(nothing)'}; `stele tablet list` shows all",
        code=Code.NOT_FOUND,
    )


def _ensure_voter(tablet: master_pb2.TabletViewPB, target: str, known: dict[str, NodeHealth]) -> None:
    """Raise `Rejected` unless the node holds a voter of the tablet and is alive, as far as the masters know."""
    peers = {id_from_pb(p.node_id): p for p in tablet.committed_config.peers}
    voters = [n for n, p in peers.items() if p.member_type == common_pb2.VOTER]
    where = f"tablet {tablet.tablet_id.hex()} of {tablet.table_name}"
    may = f"its voters are on {', '.join(_name(n, known) for n in voters)}"
    peer, name = peers.get(target), _name(target, known)
    if peer is None:
        raise Rejected(f"{name} holds no replica of {where}; {may}", code=Code.UNSAFE_CHANGE)
    if peer.member_type != common_pb2.VOTER:
        kind = common_pb2.MemberTypePB.Name(peer.member_type)
        raise Rejected(
            f"{name} holds a {kind} of {where}, and only a VOTER may lead; {may}", code=Code.UNSAFE_CHANGE
        )
    node = known.get(target)
    if node is None or node.state != "alive":
        heard = f"{node.state}, heard {node.heard}" if node is not None else "unknown"
        raise Rejected(f"{name} is {heard}, so it cannot lead {where}; {may}", code=Code.UNSAFE_CHANGE)


def _name(node_id: str, known: dict[str, NodeHealth]) -> str:
    node = known.get(node_id)
    return node.name or node.node_id[:8] if node is not None else node_id[:8] or "(nobody)"

"""Handing leadership over: who may take it, and which proposals wait meanwhile (dissertation 3.10). Part of
`Leader`.

Invariants: no proposal enters the log during a transfer. When the transfer ends, the proposals that were held
back are proposed if this replica still leads, and refused if not.
"""

from __future__ import annotations

from stele.model.config import MemberType
from stele.model.entry import ENTRY_COST_BYTES
from stele.model.errors import Code
from stele.model.ids import ReplicaId
from stele.raft.effects import TransferFailed
from stele.raft.events import Propose, TransferLeadership
from stele.raft.lease import Lease
from stele.raft.messages import TimeoutNow
from stele.raft.peers import Peers
from stele.raft.pending import Transfer
from stele.raft.progress import Progress
from stele.raft.state import RaftState
from stele.raft.status import PeerState

LAG_BYTES_MAX = 1 << 20
"""A target that keeps up counts as caught up if at most this many bytes are in flight to it. A disk writes
them in some 10 ms."""


class Handover:
    """Transfers of one leadership.

    The transfer itself is in `RaftState.pending`, as it may outlive this leader.
    """

    __slots__ = ("_held", "_lease", "_peers", "_state", "held_bytes")

    def __init__(self, state: RaftState, peers: Peers, lease: Lease) -> None:
        self._state = state
        self._peers = peers
        self._lease = lease
        self._held: list[Propose] = []
        self.held_bytes = 0
        """Bytes of the proposals held back."""

    def hold(self, event: Propose) -> None:
        """Keep a proposal until the transfer ends."""
        self._held.append(event)
        self.held_bytes += len(event.payload) + ENTRY_COST_BYTES

    def release(self) -> list[Propose]:
        """Give back the proposals that were held."""
        held, self._held, self.held_bytes = self._held, [], 0
        return held

    def on_transfer(self, event: TransferLeadership) -> None:
        """Begin a transfer to `event.target`, or to the best successor."""
        state = self._state
        under_way = state.pending.transfer
        target = event.target
        if under_way is not None:
            self._refuse(
                event,
                Code.CHANGE_IN_PROGRESS,
                f"already handing over to replica {under_way.target}; try again later",
            )
            return
        if target is None:
            target = self.best_successor(event.leads)
            if target is None:
                self._refuse(
                    event,
                    Code.UNSAFE_CHANGE,
                    "no other sound voter can be reached; try again when one answers",
                )
                return
        elif fault := self._fault(target):
            self._refuse(event, Code.UNSAFE_CHANGE, f"replica {target} {fault}; name another one")
            return
        elif event.at_once and (lag := self._lag(target)):
            self._refuse(event, Code.NOT_READY, f"replica {target} {lag}; try again when it has caught up")
            return
        self._begin(event.context, target, event.cause)

    def _refuse(self, event: TransferLeadership, code: Code, message: str) -> None:
        self._state.outbox.others.append(TransferFailed(event.context, code, message))

    def begin_unasked(self) -> bool:
        """Begin a transfer to the best successor, which no caller asked for.

        Returns False if there is no successor.
        """
        target = self.best_successor()
        if target is None:
            return False
        self._begin(None, target)
        return True

    def _begin(self, context: int | None, target: ReplicaId, cause: str = "") -> None:
        state = self._state
        due_ms = state.now_ms + state.options.election_max_ms
        state.pending.transfer = Transfer(context, target, due_ms, cause)

    def end_turn(self) -> None:
        """Ask the target to stand for election once it holds the whole log.

        A witness that leads begins to hand over as soon as another replica can lead.
        """
        state = self._state
        if state.pending.transfer is None and state.witness:
            self.begin_unasked()
        transfer = state.pending.transfer
        if transfer is None or transfer.sent:
            return
        progress = self._peers.progress.get(transfer.target)
        if progress is not None and progress.match == state.log.last_index:
            transfer.sent = transfer.asked = True
            # From here on the target may win, so this leader must answer no read alone.
            asks = TimeoutNow(state.term, transfer.cause, self._lease.give_up())
            state.outbox.send(transfer.target, asks, 0)

    def end(self, code: Code, why: str) -> None:
        """End the transfer, because leadership is over. It fails, unless its target was asked to stand: then the
        target may still win."""
        pending = self._state.pending
        if pending.transfer is not None and not pending.transfer.asked:
            pending.end_transfer(code, f"leadership ended: {why}")

    def best_successor(self, leads: tuple[tuple[ReplicaId, int], ...] = ()) -> ReplicaId | None:
        """The sound voter that keeps up and whose node leads the fewest groups; if none keeps up, the most
        advanced.

        Of several such voters it is the most advanced, then the first in the configuration. A lag of a few
        entries does not matter, as writes are held until the target has them. `leads`: how many groups the
        nodes of peers lead, by replica_id.
        """
        led = dict(leads)
        best: ReplicaId | None = None
        best_rank = (False, 0, 0)
        for peer in self._state.config.peers:
            if self._fault(peer.replica_id):
                continue
            progress = self._peers.progress[peer.replica_id]
            keeps_up = self._keeps_up(progress)
            rank = (keeps_up, -led.get(peer.replica_id, 0) if keeps_up else 0, progress.match)
            if best is None or rank > best_rank:
                best, best_rank = peer.replica_id, rank
        return best

    def _fault(self, target: ReplicaId) -> str:
        """Why a replica must not take over; "" if it may."""
        state = self._state
        peer = state.config.peer(target)
        progress = self._peers.progress.get(target)
        if peer is None or progress is None:
            return "is not another member of this configuration"
        if peer.member_type is not MemberType.VOTER:
            return f"is a {peer.member_type.name}, and only a VOTER may lead"
        if progress.failed:
            return "has FAILED"
        if not progress.reachable(state.now_ms - state.options.election_max_ms):
            return "does not answer its leader"
        return "" if progress.has_data else "does not hold the rows yet"

    def _lag(self, target: ReplicaId) -> str:
        """Why the target is too far behind, in words; "" if it is not. Otherwise a transfer would hold up
        proposals for too long. The target must be fit to lead in all other respects."""
        progress = self._peers.progress[target]
        if self._keeps_up(progress) and progress.inflight_bytes <= LAG_BYTES_MAX:
            return ""
        return f"lacks {max(1, self._state.log.last_index - progress.match):,} entries of the log"

    def _keeps_up(self, progress: Progress) -> bool:
        """Whether the peer was sent all committed entries, and acknowledges what it receives."""
        state = self._state
        stalled = progress.stuck(state.now_ms - state.options.election_min_ms)
        return progress.state is PeerState.REPLICATE and progress.next > state.commit_index and not stalled

"""Proposals and reads of callers, and what becomes of them when leadership is handed over or lost (dissertation 3.10).

Invariants: while leadership is being handed over nothing new enters the log; what was held back is proposed once the
attempt ends or refused if leadership is gone, so it is never silently dropped.
"""

from __future__ import annotations

from stele.model.config import MemberType
from stele.model.entry import ENTRY_COST_BYTES, Entry, EntryKind
from stele.model.errors import Code
from stele.model.ids import OpId, ReplicaId
from stele.raft.core_base import NEVER_MS
from stele.raft.core_change import ChangePart
from stele.raft.effects import (
    ProposalRefused,
    Proposed,
    ReadReady,
    ReadRefused,
    Role,
    TransferDone,
    TransferFailed,
)
from stele.raft.events import Propose, RequestRead, TransferLeadership
from stele.raft.messages import TimeoutNow
from stele.raft.progress import Progress
from stele.raft.status import PeerState


class _Transfer:
    """A hand-over under way. `context` is None where the leader began it by itself. `sent`: TimeoutNow needs not be sent again
    now; `asked`: it was sent, so that the target may lead by it."""

    __slots__ = ("asked", "context", "due_ms", "sent", "target")

    def __init__(self, context: int | None, target: ReplicaId, due_ms: int) -> None:
        self.context = context
        self.target = target
        self.due_ms = due_ms
        self.asked = False
        self.sent = False


class HandoverPart(ChangePart):
    """Answers Propose, RequestRead and TransferLeadership."""

    _transfer: _Transfer | None = None

    def _init_handover(self) -> None:
        self._held: list[Propose] = []
        self._held_bytes = 0

    @property
    def transferring(self) -> bool:
        """Whether leadership is being handed over."""
        return self._transfer is not None

    # Proposals

    def _on_propose(self, event: Propose) -> None:
        if self.role is not Role.LEADER:
            self._refuse_proposal(
                event, Code.NOT_LEADER, f"replica {self.self_replica} does not lead; ask {self.leader}"
            )
        elif event.kind not in (EntryKind.WRITE, EntryKind.CEILING):
            self._refuse_proposal(
                event, Code.INVALID_ARGUMENT, f"{event.kind.name} entries are the core's own"
            )
        elif self._witness:
            self._refuse_proposal(
                event, Code.NOT_LEADER, "a witness leads only until a holder of rows takes over"
            )
        elif self.log.unhanded_bytes + self._held_bytes > self.options.uncommitted_bytes_max:
            self._refuse_proposal(
                event,
                Code.THROTTLED,
                f"{self.log.unhanded_bytes} bytes wait to be committed; try again later",
            )
        elif self._transfer is not None:
            self._held.append(event)
            self._held_bytes += len(event.payload) + ENTRY_COST_BYTES
        else:
            self._propose(event)

    def _propose(self, event: Propose) -> None:
        index = self.log.last_index + 1
        self.log.append(Entry(self.term, index, event.kind, event.timestamp, event.payload))
        self._out.append(Proposed(event.context, OpId(self.term, index)))

    def _refuse_proposal(self, event: Propose, code: Code, message: str) -> None:
        self._out.append(ProposalRefused(event.context, code, message))

    def _release_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        for event in held:
            self._on_propose(event)

    # Reads

    def _on_request_read(self, event: RequestRead) -> None:
        if self.role is not Role.LEADER:
            message = f"replica {self.self_replica} does not lead; ask {self.leader}"
            self._out.append(ReadRefused(event.context, Code.NOT_LEADER, message))
        elif self.is_witness:
            message = "a witness leads only until a holder of rows takes over"
            self._out.append(ReadRefused(event.context, Code.NOT_LEADER, message))
        else:
            self._reads.waiting.append(event.context)

    def _serve_reads(self) -> bool:
        """Answer what is confirmed, begin the next round; whether peers must be asked."""
        reads = self._reads
        for context in reads.confirmed(self._voter_ids, self.self_replica, self.config.majority):
            self._out.append(ReadReady(context, reads.index))
        # Before something of the own term is committed, the commit index may be behind (Raft §8).
        if not reads.waiting or reads.asked or not self.term_committed:
            return False
        reads.begin(self.commit_index)
        for context in reads.confirmed(self._voter_ids, self.self_replica, self.config.majority):
            self._out.append(ReadReady(context, reads.index))
        return bool(reads.asked)

    # Transfer

    def _on_transfer(self, event: TransferLeadership) -> None:
        refused: tuple[Code, str] | None = None
        target = event.target
        if self.role is not Role.LEADER:
            refused = Code.NOT_LEADER, f"replica {self.self_replica} does not lead; ask {self.leader}"
        elif self._transfer is not None:
            refused = Code.CHANGE_IN_PROGRESS, f"already handing over to {self._transfer.target}"
        elif target is None:
            target = self._best_successor(event.leads)
            if target is None:
                refused = Code.UNSAFE_CHANGE, "no other sound voter can be reached"
        elif not self._may_succeed(target):
            refused = Code.UNSAFE_CHANGE, f"replica {target} is no sound VOTER that can be reached"
        if refused is not None or target is None:
            code, message = refused or (Code.INVALID_ARGUMENT, "no target")
            self._out.append(TransferFailed(event.context, code, message))
        else:
            self._begin_transfer(event.context, target)

    def _begin_transfer(self, context: int | None, target: ReplicaId) -> None:
        self._transfer = _Transfer(context, target, self._now_ms + self.options.election_max_ms)

    def _hand_over(self, cause: str) -> bool:
        target = self._best_successor()
        if target is None:
            return False
        self._begin_transfer(None, target)
        return True

    def _may_succeed(self, target: ReplicaId) -> bool:
        peer = self.config.peer(target)
        progress = self._progress.get(target)
        if peer is None or progress is None or peer.member_type is not MemberType.VOTER:
            return False
        return progress.has_data and progress.reachable(self._now_ms - self.options.election_max_ms)

    def _best_successor(self, leads: tuple[tuple[ReplicaId, int], ...] = ()) -> ReplicaId | None:
        """Of the sound voters that keep up, the one that leads least; if none does, the most advanced. Among equals the most
        advanced, then the first in the configuration. A few entries make no difference: writes are held until it has them."""
        led = dict(leads)
        best: ReplicaId | None = None
        best_rank = (False, 0, 0)
        for peer in self.config.peers:
            if not self._may_succeed(peer.replica_id):
                continue
            progress = self._progress[peer.replica_id]
            keeps_up = self._keeps_up(progress)
            rank = (keeps_up, -led.get(peer.replica_id, 0) if keeps_up else 0, progress.match)
            if best is None or rank > best_rank:
                best, best_rank = peer.replica_id, rank
        return best

    def _keeps_up(self, progress: Progress) -> bool:
        """Whether it was sent all that is committed, and acknowledges what it is sent."""
        stalled = progress.stuck(self._now_ms - self.options.election_min_ms)
        return progress.state is PeerState.REPLICATE and progress.next > self.commit_index and not stalled

    def _consider_transfer(self) -> None:
        if self._transfer is None and self.is_witness:
            self._hand_over("a witness does not stay leader")
        transfer = self._transfer
        if transfer is None or transfer.sent:
            return
        progress = self._progress.get(transfer.target)
        if progress is not None and progress.match == self.log.last_index:
            transfer.sent = transfer.asked = True
            self._send(transfer.target, TimeoutNow(self.term), 0)

    def _end_transfer(self, code: Code | None, message: str) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None and transfer.context is not None:
            if code is None:
                self._out.append(TransferDone(transfer.context))
            else:
                self._out.append(TransferFailed(transfer.context, code, message))

    def _tick_transfer(self) -> None:
        transfer = self._transfer
        if transfer is None:
            return
        if self._now_ms >= transfer.due_ms:
            self._end_transfer(Code.TIMED_OUT, f"replica {transfer.target} did not take over in time")
            if self.role is Role.LEADER:
                self._release_held()
        elif self.role is Role.LEADER and transfer.sent:
            transfer.sent = False  # TimeoutNow may have been lost; the turn's end sends it again

    def _on_leader_known(self, leader: ReplicaId) -> None:
        transfer = self._transfer
        if transfer is not None:
            if leader == transfer.target:
                self._end_transfer(None, "")
            else:
                self._end_transfer(Code.UNAVAILABLE, f"replica {leader} leads now, not {transfer.target}")

    def _become_leader(self, cause: str) -> None:
        if self._transfer is not None:
            self._end_transfer(Code.UNAVAILABLE, f"replica {self.self_replica} was elected again")
        super()._become_leader(cause)

    def _on_leadership_end(self, code: Code, cause: str) -> None:
        self._heartbeat_due_ms = NEVER_MS
        held, self._held, self._held_bytes = self._held, [], 0
        for event in held:
            self._refuse_proposal(event, code, f"leadership ended before it was proposed: {cause}")
        for context in self._reads.abandon():
            self._out.append(ReadRefused(context, code, f"leadership ended: {cause}"))
        if self._transfer is not None and not self._transfer.asked:
            self._end_transfer(code, f"leadership ended: {cause}")

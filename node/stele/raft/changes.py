"""Membership while leading: one change at a time, and the promotions that the leader makes by itself. Part of
`Leader`.

Invariants: no change begins before an entry of this leader's term is committed, nor while another is pending.
The leader is a voter of every configuration that it appends; a leader that is to be removed hands over
instead.
"""

from __future__ import annotations

from dataclasses import replace

from stele.model.config import Configuration, MemberType, Peer, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, ensure
from stele.model.ids import OPID_NONE, OpId
from stele.raft.cause import cause_of
from stele.raft.effects import ChangeRefused, ConfigChanged, Role
from stele.raft.events import ChangeType, ProposeChange
from stele.raft.handover import Handover
from stele.raft.membership import KnownPeer, Refusal, changed_peers, unsafe
from stele.raft.peers import Peers
from stele.raft.pending import PendingChange
from stele.raft.progress import Progress
from stele.raft.state import RaftState


class Changes:
    """Membership changes of one leadership."""

    __slots__ = ("_causes", "_handover", "_peers", "promotion_due", "state")

    def __init__(self, state: RaftState, peers: Peers, handover: Handover) -> None:
        self.state = state
        self._peers = peers
        self._handover = handover
        self.promotion_due = False
        """Whether a peer that waits to become a voter has answered in this turn."""
        self._causes: dict[int, str] = {}
        """By replica_id: the cause of the last change of a peer.

        The promotion that follows has the same cause.
        """

    def on_propose_change(self, event: ProposeChange) -> None:
        """Append the new configuration, or refuse it with the reason."""
        refusal = self.not_now(event) or self._begin_change(event)
        if refusal is not None:
            self.state.outbox.others.append(ChangeRefused(event.context, refusal.code, refusal.message))

    def not_now(self, event: ProposeChange) -> Refusal | None:
        """Why no membership change may begin now; None if one may."""
        state = self.state
        pending = state.pending_change_index
        if state.pending.transfer is not None:
            return Refusal(Code.STEPPING_DOWN, "leadership is being handed over; ask the next leader")
        if not state.term_committed:
            return Refusal(Code.NOT_READY, f"nothing of term {state.term} is committed yet; try again")
        if pending is not None:
            return Refusal(
                Code.CHANGE_IN_PROGRESS, f"the change at index {pending} is not committed yet; try again"
            )
        if event.cas_opid_index != state.config.opid_index:
            return Refusal(
                Code.CAS_FAILED,
                f"configuration {state.config.opid_index} is in force, not {event.cas_opid_index}; read it "
                f"again",
            )
        return None

    def _begin_change(self, event: ProposeChange) -> Refusal | None:
        state = self.state
        peers = changed_peers(state.config, event)
        if isinstance(peers, Refusal):
            return peers
        refusal = self._unsafe(peers)
        if refusal is not None:
            return refusal
        if not any(p.replica_id == state.self_replica and p.votes for p in peers):
            if self._handover.begin_unasked():
                return Refusal(
                    Code.STEPPING_DOWN,
                    "the leader itself is to be removed and hands over first; ask the next leader",
                )
            return Refusal(
                Code.UNSAFE_CHANGE,
                "the leader itself is to be removed, and no other voter can take over now; try again later",
            )
        cause = cause_of(event)
        if event.change_type is ChangeType.REMOVE:
            self._causes.pop(event.peer.replica_id, None)
        else:
            self._causes[event.peer.replica_id] = cause
        self.append(
            event.context, peers, cause, f"{event.change_type.name} of replica {event.peer.replica_id}"
        )
        return None

    def append(self, context: int | None, peers: tuple[Peer, ...], cause: str, why: str) -> None:
        """Append the configuration; it is in force from now on. The effects report `cause` and `why`."""
        state = self.state
        index = state.log.last_index + 1
        state.pending.change = PendingChange(context, OpId(state.term, index), cause)
        payload = encode_configuration(Configuration(index, peers, state.config.incarnation))
        state.log.append(Entry(state.term, index, EntryKind.CONFIG, 0, payload))
        state.judge_witness()
        state.outbox.others.append(ConfigChanged(state.config, False, f"{cause}: {why}"))
        ensure(
            state.resting_role is Role.FOLLOWER, "raft: a leader must stay a voter of its own configuration"
        )
        self._peers.follow_config()

    def _unsafe(self, peers: tuple[Peer, ...]) -> Refusal | None:
        state = self.state
        return unsafe(state.config, peers, self._known_peers(), state.commit_index, state.log.term_at)

    def _known_peers(self) -> dict[int, KnownPeer]:
        state = self.state
        since = state.now_ms - state.options.election_max_ms
        seen: dict[int, KnownPeer] = {
            # Assumes that a majority can be reached: a leader whose own sync stalls steps down.
            state.self_replica: KnownPeer(state.log.durable_index, True, False, state.has_data)
        }
        for progress in self._peers.progress.values():
            seen[progress.replica_id] = KnownPeer(
                progress.match,
                progress.reachable(since),
                progress.failed,
                progress.has_data,
                progress.stuck(since),
            )
        return seen

    # Promotions

    def candidate_moved(self, progress: Progress) -> None:
        """Note that a peer which waits to become a voter has answered."""
        state = self.state
        progress.judge_round(
            state.log.last_index, state.commit_index, state.now_ms, state.options.election_max_ms
        )
        self.promotion_due = True

    def consider_promotion(self) -> None:
        """Promote the first peer that is ready. One promotion at a time."""
        state = self.state
        self.promotion_due = False
        if (
            state.pending_change_index is not None
            or not state.term_committed
            or state.pending.transfer is not None
        ):
            return
        for peer in state.config.peers:
            progress = self._peers.progress.get(peer.replica_id)
            if progress is None or not self._ready(peer, progress):
                continue
            voter = replace(peer, member_type=MemberType.VOTER, promote=False, witness_start=OPID_NONE)
            peers = tuple(voter if p is peer else p for p in state.config.peers)
            if self._unsafe(peers) is None:
                cause = self._causes.pop(peer.replica_id, "") or cause_of(state.event)
                self.append(None, peers, cause, f"replica {peer.replica_id} has caught up")
                return

    def _ready(self, peer: Peer, progress: Progress) -> bool:
        if progress.failed or not progress.has_data or not progress.round_fast:
            return False
        since = self.state.now_ms - self.state.options.election_max_ms
        if not progress.reachable(since) or progress.stuck(since):
            return False
        return peer.promote or peer.member_type is MemberType.WITNESS

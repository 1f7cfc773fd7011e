"""A leader's peers: who votes, up to where each copy counts, how many answer.

Part of `Leader`; sends no messages.

Invariant: every other peer of the active configuration has a Progress. A removed peer keeps its Progress for
a while.
"""

from __future__ import annotations

from stele.model.config import MemberType
from stele.model.ids import ReplicaId
from stele.raft.effects import PeerReached, PeerSound
from stele.raft.progress import Progress
from stele.raft.state import RaftState


class Peers:
    """The peers of one leadership."""

    __slots__ = ("_state", "progress", "recount", "voters")

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self.progress: dict[int, Progress] = {}
        """What this leader knows of each peer, by replica_id, in the order in which the peers joined."""
        self.voters: tuple[ReplicaId, ...] = ()
        """The voters of the active configuration, this leader included."""
        self.recount = True
        """Whether copies must be counted again: something has changed that the commit index depends on."""
        self.follow_config()

    def follow_config(self) -> None:
        """Adopt a changed active configuration: begin a Progress for each new peer. Removed peers are updated
        for a while, so that they learn of their removal.
        """
        state = self._state
        config = state.config
        self.recount = True
        self.voters = tuple(p.replica_id for p in config.voters)
        now = state.now_ms
        for peer in config.peers:
            if peer.replica_id != state.self_replica and peer.replica_id not in self.progress:
                self.progress[peer.replica_id] = Progress(
                    peer.replica_id, state.log.last_index + 1, now, state.options.inflight_bytes_max
                )
        pending_index = state.pending_change_index
        before = config if pending_index is None else state.log.config_at(pending_index - 1)
        for progress in self.progress.values():
            now_is = config.peer(progress.replica_id)
            if now_is is not None:
                progress.departing_until_ms = None
            elif progress.departing_until_ms is None:
                progress.departing_until_ms = now + 2 * state.options.election_max_ms
            # A voter that loses its vote gets the change only once that is committed. Otherwise it could hold
            # the longest log, while it may not campaign and the others still need its vote. Then nobody could
            # lead.
            was = before.peer(progress.replica_id)
            leaving = was is not None and was.votes and (now_is is None or not now_is.votes)
            progress.hold_from = pending_index if leaving else None
            progress.promotes = now_is is not None and (
                now_is.member_type is MemberType.WITNESS
                or (now_is.promote and now_is.member_type is not MemberType.VOTER)
            )

    def tell_sound(self, progress: Progress, sound: bool) -> None:
        """Report to the owner that a peer says it is FAILED, or that it answers as a sound replica again."""
        progress.failed = not sound
        self.recount = True  # its copy counts again, also where it acknowledges nothing new
        why = "it answers as a sound replica" if sound else "it says that it is FAILED"
        self._state.outbox.others.append(PeerSound(progress.replica_id, sound, self._state.because(why)))

    def tell_reached(self, progress: Progress, reached: bool, why: str) -> None:
        """Report to the owner that a peer does not answer, or answers again."""
        progress.unreached = not reached
        self._state.outbox.others.append(PeerReached(progress.replica_id, reached, self._state.because(why)))

    def answered_since(self, since_ms: int) -> int:
        """How many voters have answered since `since_ms`, this leader included."""
        own, progress = self._state.self_replica, self.progress
        return sum(1 for voter in self.voters if voter == own or progress[voter].heard_since(since_ms))

    def held_by_all(self, own_written: int) -> int:
        """Return the index up to which every voter has reported the log to be in its file; 0 if one is FAILED.

        `own_written`: this leader's own file."""
        held = own_written
        for voter in self.voters:
            if voter != self._state.self_replica:
                progress = self.progress[voter]
                held = min(held, 0 if progress.failed else max(progress.match, progress.written))
        return held

    def matches(self, own_match: int) -> list[int]:
        """Return for each voter the index up to which its copy counts, lowest first.

        `own_match`: of this leader's own copy.
        """
        matches = []
        for voter in self.voters:
            if voter == self._state.self_replica:
                matches.append(own_match)
            else:
                progress = self.progress[voter]
                matches.append(0 if progress.failed else progress.match)
        matches.sort()
        return matches

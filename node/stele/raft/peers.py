"""What a leader knows of all its peers together: who votes, how far each copy counts, whether a majority answers.

Part of `Leader`; sends no messages.

Invariant: there is a Progress for every other peer of the active configuration, and for a removed one for a while.
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
        """By replica_id, in the order in which they joined."""
        self.voters: tuple[ReplicaId, ...] = ()
        """The voters of the active configuration, this leader included."""
        self.recount = True
        """Whether anything that the commit index rests on has changed since it was counted."""
        self.follow_config()

    def follow_config(self) -> None:
        """Keep a Progress per peer of the active configuration; a removed one is told of its removal for a while."""
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
            # Whoever stops being a voter hears of it once it is committed. Before, it could come to hold the longest
            # log, which it may not campaign with, while the voters still need its vote: nobody could lead.
            was = before.peer(progress.replica_id)
            leaving = was is not None and was.votes and (now_is is None or not now_is.votes)
            progress.hold_from = pending_index if leaving else None
            progress.promotes = now_is is not None and (
                now_is.member_type is MemberType.WITNESS
                or (now_is.promote and now_is.member_type is not MemberType.VOTER)
            )

    def tell_sound(self, progress: Progress, sound: bool) -> None:
        """Tell the owner that a peer says it is FAILED, or that it answers as a sound replica again."""
        progress.failed = not sound
        self.recount = True  # its copy counts again, also where it acknowledges nothing new
        why = "it answers as a sound replica" if sound else "it says that it is FAILED"
        self._state.outbox.others.append(PeerSound(progress.replica_id, sound, self._state.because(why)))

    def tell_reached(self, progress: Progress, reached: bool, why: str) -> None:
        """Tell the owner that a peer does not answer, or does again."""
        progress.unreached = not reached
        self._state.outbox.others.append(PeerReached(progress.replica_id, reached, self._state.because(why)))

    def answered_since(self, since_ms: int) -> int:
        """How many voters have answered since then, this leader included."""
        own, progress = self._state.self_replica, self.progress
        return sum(1 for voter in self.voters if voter == own or progress[voter].heard_since(since_ms))

    def matches(self, own_match: int) -> list[int]:
        """How far each voter's copy counts, lowest first. `own_match`: how far this leader's does."""
        matches = []
        for voter in self.voters:
            if voter == self._state.self_replica:
                matches.append(own_match)
            else:
                progress = self.progress[voter]
                matches.append(0 if progress.failed else progress.match)
        matches.sort()
        return matches

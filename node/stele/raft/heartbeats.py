"""What a leader does at each Tick: count who answers, check each peer, send heartbeats. Part of `Leader`.

A beat stands for a heartbeat that would tell its peer nothing new. Its node sends the beats of all its leaders in one message
(stele.tserver.beating), without a turn of any core. So a thousand groups that are written to now and then cost little.

Invariants: a sound peer gets a message or a beat at least each `heartbeat_ms`, however its entries are delayed on their
own stream. Whatever is not as usual takes a heartbeat: a beat only says that its leader still leads.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.model.ids import ReplicaId
from stele.raft.peers import Peers
from stele.raft.progress import Progress
from stele.raft.replication import Replication
from stele.raft.state import RaftState
from stele.raft.status import PeerState

_PROBE_MAX = 4
"""The longest pause between two probes of a lost peer, in shortest election timeouts."""


class Heartbeats:
    """The heartbeats of one leadership."""

    __slots__ = ("_peers", "_replication", "_state", "due_ms")

    def __init__(self, state: RaftState, peers: Peers, replication: Replication) -> None:
        self._state = state
        self._peers = peers
        self._replication = replication
        self.due_ms = state.now_ms + state.options.heartbeat_ms
        """When to look at all peers again."""

    def without_majority(self) -> str:
        """Why this leader has to step down: no majority has answered within an election timeout.

        Return "" if a majority has.
        """
        state = self._state
        heard = self._peers.answered_since(state.now_ms - state.options.election_max_ms)
        if heard >= state.config.majority:
            return ""
        voters = len(self._peers.voters)
        return f"only {heard} of {voters} voters answered within {state.options.election_max_ms} ms"

    def send(self) -> None:
        """Check each peer, and send the heartbeats that are due.

        Forget a removed peer once its `departing_until_ms` is over.
        """
        now = self._state.now_ms
        self.due_ms = now + self._state.options.heartbeat_ms
        gone = 0
        for progress in self._peers.progress.values():
            due = progress.departing_until_ms
            if due is not None and now >= due and progress.hold_from is None:
                gone = progress.replica_id
            else:
                self._look(progress)
        if gone:
            del self._peers.progress[gone]

    def beat(self, now_ms: int, takes_beats: Callable[[ReplicaId], bool]) -> tuple[ReplicaId, ...] | None:
        """In place of `send`: choose the peers that a beat is to tell that this leader leads, and count them as told.

        A peer that does not answer is left out while its next probe is not due. Returns None if `send` must run.
        """
        state, options = self._state, self._state.options
        due_ms = now_ms + options.heartbeat_ms
        chosen: list[Progress] = []
        alone = False
        for progress in self._peers.progress.values():
            silent_ms = now_ms - progress.last_heard_ms
            if progress.state is PeerState.PROBE and progress.probe_sent:
                again_ms = self._again_ms(progress)
                if now_ms >= again_ms or not (progress.unreached or silent_ms <= options.unreached_ms):
                    return None
                alone = True
                due_ms = min(due_ms, again_ms)
                continue
            if not (
                progress.state is PeerState.REPLICATE
                and progress.takes_beat(state.commit_index, state.all_replicated_index)
                and silent_ms <= options.election_min_ms * 2 // 3  # then a heartbeat still comes in time
                and takes_beats(progress.replica_id)
            ):
                return None
            if progress.inflight and now_ms - progress.moved_ms > options.election_min_ms:
                return None
            progress.note_lag(self._replication.last_for(progress), now_ms)
            next_ms = min(progress.updated_ms, progress.heard_ms or 0) + options.heartbeat_ms
            if now_ms < next_ms:
                due_ms = min(due_ms, next_ms)
            else:
                chosen.append(progress)
        if alone and self._peers.answered_since(now_ms - options.election_max_ms) < state.config.majority:
            return None
        for progress in chosen:
            progress.updated_ms = now_ms
        self.due_ms = due_ms
        return tuple(progress.replica_id for progress in chosen)

    def _again_ms(self, progress: Progress) -> int:
        """When to send a probe again that was not answered.

        A peer whose connection broke is probed less and less often, because a node that dies is lost to many groups at
        once. When it is back, the owner says PeerFailed again, or the peer asks for votes.
        """
        options = self._state.options
        if progress.connected:
            return progress.probed_ms + options.heartbeat_ms
        low = options.election_min_ms
        return progress.probed_ms + min(
            max(low, progress.probed_ms - progress.last_heard_ms), _PROBE_MAX * low
        )

    def _look(self, progress: Progress) -> None:
        """Check whether the peer answers and makes progress, and send it a heartbeat if one is due."""
        state, options = self._state, self._state.options
        now = state.now_ms
        progress.note_lag(self._replication.last_for(progress), now)
        if not progress.unreached and now - progress.last_heard_ms > options.unreached_ms:
            self._peers.tell_reached(progress, False, f"no answer for {options.unreached_ms} ms")
        replicates = progress.state is PeerState.REPLICATE
        if replicates and progress.inflight and now - progress.moved_ms > options.election_min_ms:
            progress.probe_from(progress.match + 1)
            self._replication.heartbeat(progress)
            return
        # Neither waits for heartbeats: reads send those too, as often as they come.
        if progress.probe_sent:
            again_ms = self._again_ms(progress)
            if now < again_ms:
                self.due_ms = min(self.due_ms, again_ms)
            else:
                progress.probe_sent = False  # a lost probe is sent again by the turn's end
        elif progress.state is PeerState.SNAPSHOT and now - progress.moved_ms > options.election_max_ms:
            self._replication.needs_copy(progress)  # repeated, in case nobody could act on it before
        # Entries count as a heartbeat, too, as long as they are answered soon. On their stream they may wait
        # behind the entries of other groups; heartbeats have a stream of their own.
        answered_ms = progress.heard_ms or 0
        next_ms = min(progress.updated_ms, answered_ms) + options.heartbeat_ms
        if now < next_ms:
            self.due_ms = min(self.due_ms, next_ms)
        elif progress.state is not PeerState.PROBE:
            self._replication.heartbeat(progress)

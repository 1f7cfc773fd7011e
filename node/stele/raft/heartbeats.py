"""What a leader does at each Tick: count who answers, check each peer, send heartbeats. Part of `Leader`.

Invariant: a sound peer gets a message at least each `heartbeat_ms`, however its entries are delayed on their
own stream.
"""

from __future__ import annotations

from stele.raft.peers import Peers
from stele.raft.progress import Progress
from stele.raft.replication import Replication
from stele.raft.state import RaftState
from stele.raft.status import PeerState


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
            again_ms = progress.probed_ms + options.heartbeat_ms
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

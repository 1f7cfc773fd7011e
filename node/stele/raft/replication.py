"""What a leader sends to its peers: probes, a pipeline of entries, heartbeats. Part of `Leader`.

Invariants: entries that a peer must not have yet (`Progress.hold_from`) are not sent. The bytes in flight to
a peer exceed its window by less than one message.
"""

from __future__ import annotations

from stele.model.entry import Entry
from stele.raft.effects import PeerNeedsCopy, ReadLog
from stele.raft.events import LogRead
from stele.raft.lease import Lease
from stele.raft.messages import ENTRY_MESSAGE_BYTES, UpdateRequest
from stele.raft.peers import Peers
from stele.raft.progress import Progress
from stele.raft.reads import ReadRounds
from stele.raft.state import RaftState
from stele.raft.status import PeerState


class Replication:
    """Sends UpdateRequest to the peers of one leadership."""

    __slots__ = ("_lease", "_peers", "_reads", "_request", "_state", "early_index")

    def __init__(self, state: RaftState, peers: Peers, reads: ReadRounds, lease: Lease) -> None:
        self._state = state
        self._peers = peers
        self._reads = reads
        self._lease = lease
        self.early_index = 0
        """Index of the newest entry for which the owner wants to know when every voter has written it. 0: none."""
        self._request: UpdateRequest | None = None
        """The last message with entries of this turn.

        Peers that need the same entries are sent the same message.
        """

    def to_all(self, ask: bool) -> None:
        """Send each peer the entries it lacks.

        `ask`: a ReadIndex round began, so each peer that is sent no entries gets a heartbeat.
        """
        last_index = self._state.log.last_index
        for progress in self._peers.progress.values():
            if progress.state is PeerState.REPLICATE:
                sent = progress.next <= last_index and not progress.failed and self._stream(progress)
            else:
                sent = self._probe(progress)
            if ask and not sent:
                self.heartbeat(progress)
        self._request = None

    def heartbeat(self, progress: Progress) -> None:
        """Send an empty message at the last index where the logs are known to match.

        So only a peer that needs a copy refuses it. A heartbeat may overtake entries on another stream without
        leaving a gap.
        """
        self._update(progress, self._request_after(max(progress.match, self._state.log.start.index), ()))

    def last_for(self, progress: Progress) -> int:
        """The last index that may be sent to this peer now."""
        return self._state.log.last_index if progress.hold_from is None else progress.hold_from - 1

    def needs_copy(self, progress: Progress) -> None:
        """The peer's log ends before this one begins: tell the owner, and send heartbeats only."""
        log = self._state.log
        progress.needs_copy(log.start.index + 1, self._state.now_ms)
        why = f"it has nothing after {progress.match} that matches; this log begins after {log.start}"
        self._state.outbox.others.append(PeerNeedsCopy(progress.replica_id, self._state.because(why)))

    def send_read(self, progress: Progress, event: LogRead) -> None:
        """Send a slow peer the entries that the owner has read, if they are still those of this log."""
        log = self._state.log
        if progress.reading != event.first_index:
            return
        progress.reading = 0
        if progress.state is not PeerState.REPLICATE or progress.next != event.first_index:
            return
        # The log may have been compacted meanwhile. Then the term of the preceding entry is not known.
        if not event.entries or log.term_at(event.first_index - 1) is None:
            self.needs_copy(progress)
            return
        last = self.last_for(progress)
        entries = tuple(e for e in event.entries if e.index <= last)
        if entries and all(log.term_at(e.index) == e.term for e in entries):
            self._send_entries(progress, self._request_after(progress.next - 1, entries))

    def _request_after(self, preceding_index: int, entries: tuple[Entry, ...]) -> UpdateRequest:
        state, reads = self._state, self._reads
        return UpdateRequest(
            state.term,
            state.log.opid_at(preceding_index),
            entries,
            state.commit_index,
            reads.round_id if reads.asked else 0,
            state.now_ms,
            state.all_replicated_index,
            *self._lease.asks(state.steady_ms),
            bool(entries) and self.early_index > preceding_index,
        )

    def _update(self, progress: Progress, request: UpdateRequest) -> None:
        progress.told(request, self._state.now_ms)
        self._state.outbox.send(progress.replica_id, request, 0)

    def _probe(self, progress: Progress) -> bool:
        """Send one message to a peer whose log is not known yet, unless one is under way.

        If the peer has been silent for long it may be gone, so the message has no entries, which cost most. They follow
        once it answers. Returns whether the message was sent.
        """
        log, options = self._state.log, self._state.options
        if progress.state is not PeerState.PROBE or progress.probe_sent:
            return False
        if progress.next <= log.start.index:
            self.needs_copy(progress)
            return False
        entries: tuple[Entry, ...] = ()
        last = self.last_for(progress)
        silent = self._state.now_ms - progress.last_heard_ms > options.election_min_ms
        if log.tail_first <= progress.next <= last and not progress.failed and not silent:
            entries = log.entries_from(progress.next, options.probe_bytes_max, last)
        self._update(progress, self._request_after(progress.next - 1, entries))
        progress.sent(progress.next - 1, 0, self._state.now_ms)
        return True

    def _stream(self, progress: Progress) -> bool:
        """Send the entries that the peer lacks, as far as its window allows.

        Returns whether any were sent.
        """
        log = self._state.log
        sent = False
        last = log.last_index if progress.hold_from is None else progress.hold_from - 1
        while progress.next <= last and progress.inflight_bytes < progress.window_bytes:
            request = self._request
            if (
                request is None
                or request.preceding.index + 1 != progress.next
                or request.entries[-1].index > last
            ):
                if progress.next < log.tail_first:
                    self._read_for(progress)
                    break
                entries = log.entries_from(progress.next, self._state.options.batch_bytes_max, last)
                request = self._request = self._request_after(progress.next - 1, entries)
            self._send_entries(progress, request)
            sent = True
        return sent

    def _read_for(self, progress: Progress) -> None:
        """Ask the owner to read the entries that the peer lacks, because they are not in memory."""
        if progress.next <= self._state.log.start.index:
            self.needs_copy(progress)
        elif not progress.reading:
            progress.reading = progress.next
            read = ReadLog(progress.replica_id, progress.next, self._state.options.batch_bytes_max)
            self._state.outbox.others.append(read)

    def _send_entries(self, progress: Progress, request: UpdateRequest) -> None:
        state = self._state
        progress.told(request, state.now_ms)
        state.outbox.send(progress.replica_id, request, 0)
        size = 0
        for entry in request.entries:
            size += len(entry.payload) + ENTRY_MESSAGE_BYTES
        progress.sent(request.entries[-1].index, size, state.now_ms)

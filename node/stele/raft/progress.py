"""What a leader knows of one peer, and how much it may send it. Used by the core's leader part; sends nothing itself.

Invariants: match < next; in PROBE at most one message is out; the bytes in flight are bounded but for one entry.
"""

from __future__ import annotations

from collections import deque

from stele.model.ids import ReplicaId
from stele.raft.messages import UpdateResponse
from stele.raft.status import PeerState, PeerStatus


class Progress:
    """One peer, for one term of one leader."""

    __slots__ = (
        "base_ms",
        "behind_since_ms",
        "connected",
        "departing_until_ms",
        "failed",
        "has_data",
        "heard_ms",
        "hold_from",
        "inflight",
        "inflight_bytes",
        "match",
        "moved_ms",
        "next",
        "probe_sent",
        "promotes",
        "reading",
        "replica_id",
        "round_fast",
        "round_start_ms",
        "round_target",
        "state",
        "unreached",
        "updated_ms",
        "window_bytes",
        "window_bytes_max",
    )

    def __init__(self, replica_id: ReplicaId, next_index: int, now_ms: int, window_bytes_max: int) -> None:
        self.replica_id = replica_id
        self.state = PeerState.PROBE
        self.match = 0
        self.next = next_index
        self.probe_sent = False
        self.inflight: deque[tuple[int, int]] = deque()  # (last index, bytes) of each message under way
        self.inflight_bytes = 0
        self.window_bytes_max = window_bytes_max
        self.window_bytes = window_bytes_max
        self.base_ms = now_ms  # silence counts from here until the first answer
        self.heard_ms: int | None = None
        self.moved_ms = now_ms  # when match last rose, or the first message went out
        self.updated_ms = now_ms  # when the last message went out, whatever it held
        self.behind_since_ms: int | None = None  # since when it lacks something and match stood still
        self.connected = True
        self.failed = False
        self.unreached = False
        self.has_data = False
        self.reading = 0  # first index asked of the owner's log, 0: none
        self.departing_until_ms: int | None = None
        self.hold_from: int | None = None  # entries from here on are not sent to it yet
        self.promotes = False  # becomes a voter that holds rows once it has caught up
        # Catch-up rounds of who may become a voter (dissertation 4.2.1)
        self.round_target = next_index - 1
        self.round_start_ms = now_ms
        self.round_fast = False

    def heard_since(self, since_ms: int) -> bool:
        """Whether it has answered, as a sound replica, since then; a new peer has until its first answer is due."""
        return not self.failed and self.last_heard_ms >= since_ms

    @property
    def last_heard_ms(self) -> int:
        """When it last answered; before its first answer, when the leader began to ask it."""
        return self.base_ms if self.heard_ms is None else self.heard_ms

    def reachable(self, since_ms: int) -> bool:
        """Whether it has really answered since then, and its connection stands."""
        return self.connected and not self.failed and self.heard_ms is not None and self.heard_ms >= since_ms

    def look(self, last_index: int, now_ms: int) -> None:
        """Note whether it lacks something of what it is to have, up to `last_index`."""
        if self.match >= last_index:
            self.behind_since_ms = None
        elif self.behind_since_ms is None:
            self.behind_since_ms = now_ms

    def settled(self, last_index: int) -> bool:
        """Whether it is sound, answers, was sent all up to `last_index`, and does not wait to become a voter."""
        return (
            self.next > last_index
            and self.state is PeerState.REPLICATE
            and not (self.failed or self.unreached or self.promotes)
        )

    def stuck(self, since_ms: int) -> bool:
        """Whether it has lacked something since then and acknowledged nothing, however well it answers: its disk may
        hang, or it needs a copy."""
        return self.behind_since_ms is not None and self.behind_since_ms < since_ms

    def probe_from(self, next_index: int) -> None:
        """Fall back to one message at a time, beginning at `next_index`."""
        if self.state is PeerState.REPLICATE:
            # A pipeline that broke begins again with one message and doubles, so that a network which reorders or
            # drops is not flooded with what must be sent again.
            self.window_bytes = 1
        self.state = PeerState.PROBE
        self.next = max(next_index, self.match + 1)
        self.probe_sent = False
        self.reading = 0
        self.inflight.clear()
        self.inflight_bytes = 0

    def needs_copy(self, next_index: int, now_ms: int) -> None:
        """Its log ends before ours begins: heartbeats only."""
        self.probe_from(next_index)
        self.state = PeerState.SNAPSHOT
        self.moved_ms = now_ms

    def forgot(self, now_ms: int) -> None:
        """It has lost what it acknowledged."""
        self.match = 0
        self.moved_ms = now_ms

    def sent(self, last_index: int, size: int, now_ms: int) -> None:
        """A message with entries up to `last_index` is out."""
        if self.state is PeerState.REPLICATE:
            if not self.inflight:
                self.moved_ms = now_ms
            self.next = last_index + 1
            self.inflight.append((last_index, size))
            self.inflight_bytes += size
        else:
            self.probe_sent = True

    def accepted(self, response: UpdateResponse, now_ms: int) -> bool:
        """A success came; whether match rose."""
        match = response.last_received.index
        rose = match > self.match
        if rose:
            self.match = match
            self.moved_ms = now_ms
            self.behind_since_ms = None
            if self.window_bytes < self.window_bytes_max:
                grown = 2 * max(self.window_bytes, self.inflight_bytes)
                self.window_bytes = min(grown, self.window_bytes_max)
            inflight = self.inflight
            while inflight and inflight[0][0] <= match:
                self.inflight_bytes -= inflight.popleft()[1]
        if self.state is not PeerState.REPLICATE:
            meets = max(match, response.preceding_index)
            if meets >= self.next - 1:
                self.state = PeerState.REPLICATE
                self.next = meets + 1
                self.probe_sent = False
                self.moved_ms = now_ms
        elif self.next <= self.match:
            self.next = self.match + 1
        return rose

    def judge_round(self, last_index: int, commit_index: int, now_ms: int, fast_ms: int) -> None:
        """Judge the catch-up round, and begin the next if it is over.

        It was fast within `fast_ms`, or if its peer has all that is committed by then: a majority is no quicker. To ask for
        that of each would keep out whoever is a little slower than a majority, for as long as writes flow.
        """
        fast = now_ms - self.round_start_ms <= fast_ms
        if self.match >= self.round_target:
            self.round_fast = fast or self.match >= commit_index
            self.round_target = last_index
            self.round_start_ms = now_ms
        elif not fast:
            self.round_fast = False

    def status(self, since_ms: int) -> PeerStatus:
        """A frozen view."""
        return PeerStatus(
            self.replica_id,
            self.state,
            self.match,
            self.next,
            self.inflight_bytes,
            self.last_heard_ms,
            self.reachable(since_ms),
            self.unreached,
            self.failed,
            self.has_data,
        )

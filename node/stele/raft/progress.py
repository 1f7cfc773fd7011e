"""What a leader knows of one peer, and how much it may send it. Owned by `Peers`; sends nothing itself.

Invariants: each field states its own. `invariants.check` checks them after every simulated step.
"""

from __future__ import annotations

from collections import deque

from stele.model.ids import ReplicaId
from stele.raft.messages import UpdateRequest, UpdateResponse
from stele.raft.status import PeerState, PeerStatus


class Progress:
    """One peer, for one term of one leader."""

    __slots__ = (
        "base_ms",
        "beat_refused",
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
        "probed_ms",
        "promotes",
        "reading",
        "replica_id",
        "round_fast",
        "round_start_ms",
        "round_target",
        "state",
        "told_commit",
        "told_replicated",
        "unreached",
        "updated_ms",
        "window_bytes",
        "window_bytes_max",
        "written",
    )

    def __init__(self, replica_id: ReplicaId, next_index: int, now_ms: int, window_bytes_max: int) -> None:
        self.replica_id = replica_id
        self.state = PeerState.PROBE
        self.match = 0
        """The peer holds the log durably up to here, as it said in this term.

        Below `next`; falls only in `forgot`.
        """
        self.written = 0
        """The peer's log matches up to here and is in its file, as it said in this term. It may not be synced yet, so no
        commit counts it."""
        self.next = next_index
        """The next index to send: above `match`, at most one past the leader's log."""
        self.probe_sent = False
        """Whether the one message of PROBE is under way; false in every other state."""
        self.probed_ms = now_ms
        """When the last probe was sent. Heartbeats do not change it. Not in the future."""
        self.inflight: deque[tuple[int, int]] = deque()
        """(last index, bytes) of each message under way; the indexes rise from `match` to `next`, both
        excluded.

        Empty outside REPLICATE.
        """
        self.inflight_bytes = 0
        """The sum of the bytes in `inflight`. Without the newest message it is below `window_bytes`."""
        self.window_bytes_max = window_bytes_max
        self.window_bytes = window_bytes_max
        """Entries are sent while fewer bytes than this are in flight. From 1 to `window_bytes_max`;
        acknowledgements raise it."""
        self.base_ms = now_ms
        """When the leader first expected an answer.

        The peer's silence counts from here until its first answer. Never changes.
        """
        self.heard_ms: int | None = None
        """When it last answered: never before `base_ms`, never falls. None before the first answer."""
        self.moved_ms = now_ms
        """When `match` last changed, an empty pipeline got a message, or REPLICATE or SNAPSHOT began. Not in the
        future."""
        self.updated_ms = now_ms
        """When the last message of any kind was sent. Not in the future."""
        self.told_commit = -1
        """The commit index in the last message to it. At most the leader's."""
        self.told_replicated = -1
        """`all_replicated_index` in the last message to it. At most the leader's."""
        self.beat_refused = False
        """It refused the last beat: it gets a heartbeat of its own. False after its next answer."""
        self.behind_since_ms: int | None = None
        """Since when it has lacked entries while `match` did not rise, as seen at a tick.

        None once `match` rises.
        """
        self.connected = True
        """False after its node failed, until its next answer."""
        self.failed = False
        """Whether its last answer said that it is FAILED. Then its copy counts for nothing, and it gets no entries."""
        self.unreached = False
        """Whether the owner knows that the peer does not answer. False after its next answer."""
        self.has_data = False
        """Whether its last answer said that it holds the rows."""
        self.reading = 0
        """First index of the entries that the owner reads for it, 0 if none.

        At most `next`; 0 outside REPLICATE.
        """
        self.departing_until_ms: int | None = None
        """Until when a removed peer is still updated.

        None exactly while it is in the active configuration.
        """
        self.hold_from: int | None = None
        """If the pending change takes this peer's vote away: the change's index. Entries from there on are not
        sent to the peer yet.

        None in all other cases.
        """
        self.promotes = False
        """Whether the leader makes it a voter with rows once it has caught up. Only for a peer of the active
        configuration."""
        # Catch-up rounds of a peer that may become a voter (dissertation 4.2.1)
        self.round_target = next_index - 1
        """The catch-up round ends when `match` reaches this index. It is at most the leader's last index."""
        self.round_start_ms = now_ms
        """When the catch-up round began. Not in the future."""
        self.round_fast = False
        """Whether the last catch-up round ended in time, and the present one is not late."""

    def heard_since(self, since_ms: int) -> bool:
        """Whether it has answered as a sound replica since `since_ms`.

        A peer that has not answered yet counts as heard at the time when the leader began to ask it.
        """
        return not self.failed and self.last_heard_ms >= since_ms

    @property
    def last_heard_ms(self) -> int:
        """When it last answered; before its first answer, when the leader began to ask it."""
        return self.base_ms if self.heard_ms is None else self.heard_ms

    def reachable(self, since_ms: int) -> bool:
        """Whether it is sound, has really answered since `since_ms`, and its node has not failed after that."""
        return self.connected and not self.failed and self.heard_ms is not None and self.heard_ms >= since_ms

    def takes_beat(self, commit_index: int, all_replicated_index: int) -> bool:
        """Whether a heartbeat would tell it nothing new, and it is a sound peer that stays one."""
        return (
            self.told_commit == commit_index
            and self.told_replicated == all_replicated_index
            and self.connected
            and not self.failed
            and not self.unreached
            and not self.beat_refused
            and not self.promotes
            and self.heard_ms is not None
            and self.departing_until_ms is None
            and self.hold_from is None
        )

    def note_lag(self, last_index: int, now_ms: int) -> None:
        """Note whether it lacks entries up to `last_index`."""
        if self.match >= last_index:
            self.behind_since_ms = None
        elif self.behind_since_ms is None:
            self.behind_since_ms = now_ms

    def stuck(self, since_ms: int) -> bool:
        """Whether it has lacked entries since before `since_ms` and acknowledged none, though it may answer.

        Its disk may hang, or it needs a copy.
        """
        return self.behind_since_ms is not None and self.behind_since_ms < since_ms

    def probe_from(self, next_index: int) -> None:
        """Send one message at a time, beginning at `next_index`, until the logs are known to meet."""
        if self.state is PeerState.REPLICATE:
            # After a break the window begins at one message and doubles. So a network that reorders or drops
            # messages is not flooded with what must be sent again.
            self.window_bytes = 1
        self.state = PeerState.PROBE
        self.next = max(next_index, self.match + 1)
        self.probe_sent = False
        self.reading = 0
        self.inflight.clear()
        self.inflight_bytes = 0

    def needs_copy(self, next_index: int, now_ms: int) -> None:
        """Its log ends before the leader's begins: send heartbeats only."""
        self.probe_from(next_index)
        self.state = PeerState.SNAPSHOT
        self.moved_ms = now_ms

    def forgot(self, now_ms: int) -> None:
        """Note that the peer has lost entries that it acknowledged."""
        self.match = self.written = 0
        self.moved_ms = now_ms

    def told(self, request: UpdateRequest, now_ms: int) -> None:
        """This message is sent to it now."""
        self.updated_ms = now_ms
        self.told_commit = request.commit_index
        self.told_replicated = request.all_replicated_index

    def sent(self, last_index: int, size: int, now_ms: int) -> None:
        """Note that a message with entries up to `last_index` was sent."""
        if self.state is PeerState.REPLICATE:
            if not self.inflight:
                self.moved_ms = now_ms
            self.next = last_index + 1
            self.inflight.append((last_index, size))
            self.inflight_bytes += size
        else:
            self.probe_sent, self.probed_ms = True, now_ms

    def accepted(self, response: UpdateResponse, now_ms: int) -> bool:
        """Note that the peer accepted a message. Returns whether `match` rose."""
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
        """Judge the catch-up round, and begin the next one if it is over.

        A round is fast if it took at most `fast_ms`, or if the peer now has all committed entries. In the second
        case the peer is as fast as a majority. Without that rule, a peer a little slower than a majority would never
        be promoted while writes flow.
        """
        fast = now_ms - self.round_start_ms <= fast_ms
        if self.match >= self.round_target:
            self.round_fast = fast or self.match >= commit_index
            self.round_target = last_index
            self.round_start_ms = now_ms
        elif not fast:
            self.round_fast = False

    def status(self, since_ms: int) -> PeerStatus:
        """Return a frozen view of this peer."""
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

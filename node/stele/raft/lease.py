"""A leader's lease: voters promise to elect nobody else for a while, so that the leader may answer reads alone.

A leader asks for it with each `UpdateRequest`, and each answer that repeats the time of the request is a promise. `Promise`
belongs to the voter and outlives its roles; `Lease` belongs to one leadership. README.md has the proof.

Invariants: a voter neither votes nor stands while it is bound, unless the leader itself gave its lease up. A
leader's lease runs from the time when it sent the messages that a majority answered with a promise. It is
shorter than the promises, by the error of both clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.model.ids import ReplicaId

CLOCK_ERROR_PERCENT = 10
"""How much too fast or too slow a node's steady clock may run. By default, NTP daemons change its rate by
less."""


def counted_us(lease_ms: int) -> int:
    """Return for how many microseconds of its own clock a leader may rely on a lease. That is shorter than the
    voters' promise, because the leader's clock may be slow and the voters' clocks fast."""
    return lease_ms * 1_000 * (100 - CLOCK_ERROR_PERCENT) // (100 + CLOCK_ERROR_PERCENT)


class Promise:
    """What this replica has promised as a voter: no vote against the leader of `term`, up to and including
    `until_ms` of its owner's clock. If that clock stands still for a while, the promise lasts longer."""

    __slots__ = ("term", "until_ms")

    def __init__(self) -> None:
        self.term = 0
        self.until_ms = -1

    def give(self, term: int, until_ms: int) -> None:
        """Promise. A longer promise to an earlier leader is kept, though that leader's lease is over."""
        self.term = term
        if until_ms > self.until_ms:
            self.until_ms = until_ms

    def wait_out(self, term: int, until_ms: int) -> None:
        """After a start, keep each promise that an earlier process may have made to a leader of any term up to `term`."""
        self.give(term, until_ms)

    def binds(self, now_ms: int, released: int) -> bool:
        """Whether the promise forbids a vote now.

        `released`: the leader of this term has given up its lease for good; 0: none has. Any term from the
        promise's on ends the promise: a later leader was elected only after each earlier lease was over.
        """
        return now_ms <= self.until_ms and released < self.term


class Lease:
    """The lease of one leadership. `lease_ms`: for how long voters are asked to promise; 0: they are not asked."""

    __slots__ = ("_lease_ms", "_own", "_promised", "given_up")

    def __init__(self, own: ReplicaId, lease_ms: int) -> None:
        self._own = own
        self._lease_ms = lease_ms
        self._promised: dict[ReplicaId, int] = {}
        """By voter: when this leader sent the newest message that the voter answered with a promise, by this
        node's steady clock."""
        self.given_up = False
        """Whether this leader has asked another replica to stand. It takes no lease any more in its term."""

    def asks(self, steady_ms: int) -> tuple[int, int]:
        """Return (length, time of sending), both in ms, for the lease that a message of this moment asks for. Zeros
        mean that it asks for none."""
        if not self._lease_ms or not steady_ms or self.given_up:
            return 0, 0
        return self._lease_ms, steady_ms

    def give_up(self) -> bool:
        """Take no lease any more. Returns whether voters may have promised one to this leader."""
        self.given_up = True
        return self._lease_ms > 0

    def promised(self, voter: ReplicaId, sent_ms: int) -> None:
        """Note that a replica has promised, in answer to a message that was sent at `sent_ms`."""
        if sent_ms > self._promised.get(voter, 0):
            self._promised[voter] = sent_ms

    def holds(self, steady_us: int, voters: Iterable[ReplicaId], majority: int) -> bool:
        """Whether nobody else can lead at this time of the node's steady clock. `voters`: of the active configuration."""
        if not self._lease_ms or self.given_up:
            return False
        sent = sorted(self._promised.get(voter, 0) for voter in voters if voter != self._own)
        others = majority - 1  # this leader is one of its majority: it votes for nobody while it leads
        if not others:
            return True
        since_ms = sent[-others]
        return since_ms > 0 and steady_us < since_ms * 1_000 + counted_us(self._lease_ms)

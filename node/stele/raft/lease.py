"""A leader's lease: voters promise to elect nobody else for a while, so that the leader may answer reads alone.

A leader asks for it with each `UpdateRequest`, and each answer that repeats the time of the request is a promise. `Promise`
belongs to the voter and outlives its roles; `Lease` belongs to one leadership. README.md has the proof.

Invariants: a voter neither votes nor stands while it is bound, unless the leader itself gave its lease up. A leader counts
from when it sent what a majority promised, and counts shorter than they do by the error of two clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.model.ids import ReplicaId

CLOCK_ERROR_PERCENT = 10
"""How far the rate of a node's steady clock may be from true. By default NTP daemons correct a clock by less."""


def counted_us(lease_ms: int) -> int:
    """How many microseconds a leader counts of a lease: its clock may be slow, and the voters' clocks fast."""
    return lease_ms * 1_000 * (100 - CLOCK_ERROR_PERCENT) // (100 + CLOCK_ERROR_PERCENT)


class Promise:
    """What this replica has promised as a voter: no vote against the leader of `term`, up to and including `until_ms` of its
    owner's clock. That clock may stand still, and then the promise lasts longer."""

    __slots__ = ("term", "until_ms")

    def __init__(self) -> None:
        self.term = 0
        self.until_ms = -1

    def give(self, term: int, until_ms: int) -> None:
        """Promise. A promise to an earlier leader is kept as long, though its lease is over."""
        self.term = term
        if until_ms > self.until_ms:
            self.until_ms = until_ms

    def wait_out(self, term: int, until_ms: int) -> None:
        """After a start: keep what an earlier process may have promised, to any leader up to `term`."""
        self.give(term, until_ms)

    def binds(self, now_ms: int, released: int) -> bool:
        """Whether it forbids a vote now. `released`: the leader of this term has given its lease up for good; 0: none.

        A leader of a later term could be elected only once each earlier lease was over. So its word is enough, too.
        """
        return now_ms <= self.until_ms and released < self.term


class Lease:
    """The lease of one leadership. `lease_ms`: how long the voters are asked to promise; 0: not at all."""

    __slots__ = ("_lease_ms", "_own", "_promised", "given_up")

    def __init__(self, own: ReplicaId, lease_ms: int) -> None:
        self._own = own
        self._lease_ms = lease_ms
        self._promised: dict[ReplicaId, int] = {}
        """By voter: when the newest message was sent that it promised to, by this node's steady clock."""
        self.given_up = False
        """Whether this leader has let another one stand. It takes no lease any more in its term."""

    def asks(self, steady_ms: int) -> tuple[int, int]:
        """(length, time of sending) for a message that leaves now; zeros: it asks for no promise."""
        if not self._lease_ms or not steady_ms or self.given_up:
            return 0, 0
        return self._lease_ms, steady_ms

    def give_up(self) -> bool:
        """Take no lease any more. Returns whether voters may have promised one to this leader."""
        self.given_up = True
        return self._lease_ms > 0

    def promised(self, voter: ReplicaId, sent_ms: int) -> None:
        """A replica has promised, in answer to a message sent then."""
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

"""What a client did to one row, and what it was told. Imports the model only; shared by workload, checkers and report.

A row is a register of two values, (a, b), or absent. `update` sets b alone, so a row put together from two writes shows.

Invariant: an operation whose outcome is unknown has no end: it may take effect at any time after it began, or never.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import Enum

from stele.model.errors import Code, Rejected, Retryable, SteleError

State = tuple[int, int] | None
"""The two values of a row; None if there is none."""

NEVER = math.inf


class Kind(Enum):
    """What can be done to one row. A key space knows PUT (replace), INSERT, DELETE_IGNORE (delete), READ and SWAP (a write
    under a condition), which tables do not."""

    PUT = "put"
    INSERT = "insert"
    INSERT_IGNORE = "insert_ignore"
    UPDATE = "update"
    UPDATE_IGNORE = "update_ignore"
    DELETE = "delete"
    DELETE_IGNORE = "delete_ignore"
    READ = "read"
    SWAP = "swap"


class Told(Enum):
    """What the client was told."""

    DONE = "done"
    PRESENT = "ALREADY_PRESENT"
    ABSENT = "NOT_FOUND"
    DIFFERENT = "CAS_FAILED"
    UNKNOWN = "outcome unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation on one row. `value`: what was to be written, or what was read; of an update b alone counts.
    `expected`: the state in which alone a swap writes; its `value` None removes the row.

    `begun` and `ended` are of one clock: seconds of the monotonic clock, or hybrid times (tests/linear/cuts.py).
    `timestamp`: the hybrid time that the write was acknowledged with, 0 if none was told; if it was `one_of_many`, the
    highest of them.
    """

    key: str
    kind: Kind
    value: State
    begun: float
    ended: float = NEVER
    told: Told = Told.UNKNOWN
    client: str = ""
    timestamp: int = 0
    one_of_many: bool = False
    note: str = ""
    expected: State = None

    @property
    def complete(self) -> bool:
        """Whether it is known what came of it: some order must hold it."""
        return self.told is not Told.UNKNOWN

    @property
    def observes(self) -> bool:
        """Whether it says something of the row and changes nothing: a read, or one that was refused."""
        return self.told in (Told.PRESENT, Told.ABSENT, Told.DIFFERENT) or (
            self.kind is Kind.READ and self.complete
        )

    def apply(self, state: State) -> tuple[bool, State]:
        """(whether the client can have been told this by a row in `state`, the row afterwards).

        An operation without a known outcome does what it can: an insert of a row that is there does nothing.
        """
        if self.told is Told.PRESENT or self.told is Told.ABSENT:
            return (state is None) is (self.told is Told.ABSENT), state
        if self.told is Told.DIFFERENT:
            return state != self.expected, state
        done = self.told is Told.DONE
        match self.kind:
            case Kind.READ:
                return self.value == state, state
            case Kind.PUT:
                return True, self.value
            case Kind.INSERT | Kind.INSERT_IGNORE:
                refused = state is not None
                return not (refused and done and self.kind is Kind.INSERT), state if refused else self.value
            case Kind.UPDATE | Kind.UPDATE_IGNORE:
                if state is None or self.value is None:
                    return not (done and self.kind is Kind.UPDATE), state
                return True, (state[0], self.value[1])
            case Kind.SWAP:
                meets = state == self.expected
                return meets or not done, self.value if meets else state
            case Kind.DELETE | Kind.DELETE_IGNORE:
                return not (state is None and done and self.kind is Kind.DELETE), None


class Surprise(Exception):
    """An error that no client should meet here: Stele says that it is wrong itself, or that a right request is."""


class NotDone(Exception):
    """The operation was certainly not done: it says nothing about the row, and leaves the history."""


_UNKNOWN = frozenset((Code.UNKNOWN_OUTCOME, Code.TOO_OLD))
_TOLD = {Code.ALREADY_PRESENT: Told.PRESENT, Code.NOT_FOUND: Told.ABSENT, Code.CAS_FAILED: Told.DIFFERENT}


def told_by(error: BaseException, kind: Kind) -> Told:
    """What an error says of the operation, by the table in docs/python.md, which users go by.

    Raises:
        NotDone: the operation had no effect.
        Surprise: an error that the documents know no such operation to end with.
    """
    if isinstance(error, (asyncio.CancelledError, TimeoutError)):
        if kind is Kind.READ:
            raise NotDone from error
        return Told.UNKNOWN
    if not isinstance(error, SteleError):
        raise Surprise(f"{kind.value}: {error!r}") from error
    told = _TOLD.get(error.code)
    expected = {
        Kind.INSERT: Told.PRESENT,
        Kind.UPDATE: Told.ABSENT,
        Kind.DELETE: Told.ABSENT,
        Kind.SWAP: Told.DIFFERENT,
    }
    if isinstance(error, Rejected) and told is not None and expected.get(kind) is told:
        return told
    if error.code in _UNKNOWN and kind is not Kind.READ:
        return Told.UNKNOWN
    if isinstance(error, Retryable) or error.code is Code.CHANGE_IN_PROGRESS:
        raise NotDone from error
    raise Surprise(f"{kind.value}: {error}") from error

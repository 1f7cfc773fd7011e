"""Is a history of one row linearizable? The algorithm of Wing and Gong (1993) with Lowe's memory (2017) of the pairs
(operations that have taken effect, state) that were seen to lead nowhere.

Linearizability is local (Herlihy and Wing 1990), so each row is judged by itself. An operation of unknown outcome may
take effect at any time after it began, or never.

Invariant: the answer depends on the history alone; a history too tangled to be judged is called Undecided, never good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tests.linear.history import NEVER, Kind, Operation, State, Told

CONFIGURATIONS_MAX = 1_000_000


class Undecided(Exception):
    """More configurations than the bound: make histories shorter, or fewer operations of unknown outcome."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """No order of `history` gives what the clients were told. Some did until `culprit` ended, the last of it to end; by
    then the row could have been in any of `states`."""

    history: tuple[Operation, ...]
    culprit: Operation
    states: tuple[State, ...]


def by_key(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    """The history of each key, in order of beginning."""
    histories: dict[str, list[Operation]] = {}
    for operation in sorted(operations, key=lambda o: o.begun):
        histories.setdefault(operation.key, []).append(operation)
    return histories


def contradiction(history: Sequence[Operation], start: State = None) -> Contradiction | None:
    """Why the history of one row is not linearizable; None if it is.

    Raises:
        Undecided: it is too tangled.
    """
    if linearizable(history, start):
        return None
    ends = sorted({o.ended for o in history if o.complete})
    # A prefix of a linearizable history is linearizable: look for the first that is not.
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if linearizable(until(history, ends[middle]), start):
            low = middle + 1
        else:
            high = middle
    shown = until(history, ends[low])
    # Operations may end in one moment: the culprit is the first of them that makes the difference.
    last = [o for o in shown if o.complete and o.ended == ends[low]]
    while len(last) > 1 and not linearizable(unended(shown, last[-1:]), start):
        shown = unended(shown, [last.pop()])
    culprit = last[-1]
    states = _final_states(unended(shown, [culprit]), start, culprit)
    return Contradiction(tuple(shown), culprit, tuple(sorted(states, key=repr)))


def until(history: Sequence[Operation], moment: float) -> list[Operation]:
    """What was known at `moment`: operations that had not ended are of unknown outcome."""
    begun = [o for o in history if o.begun <= moment]
    return unended(begun, [o for o in begun if o.ended > moment])


def unended(history: Sequence[Operation], those: Sequence[Operation]) -> list[Operation]:
    """The history before `those` had ended."""
    found = []
    for o in history:
        if not any(o is one for one in those):
            found.append(o)
        elif o.kind is not Kind.READ:
            found.append(replace(o, ended=NEVER, told=Told.UNKNOWN, timestamp=0))
    return found


def _final_states(history: Sequence[Operation], start: State, culprit: Operation) -> set[State]:
    """In which states a history can leave the row by the time that `culprit` ended: those that a read would explain."""
    values = {o.value for o in history} | {start, None}
    firsts = {v[0] for v in values if v is not None}
    seconds = {v[1] for v in values if v is not None}
    few = len(firsts) * len(seconds) <= 400
    candidates = {(a, b) for a in firsts for b in seconds} | {None} if few else values
    found = set()
    for state in candidates:
        read = Operation(culprit.key, Kind.READ, state, culprit.begun, culprit.ended, Told.DONE)
        if linearizable([*history, read], start):
            found.add(state)
    return found


def linearizable(history: Sequence[Operation], start: State = None) -> bool:
    """Whether some order of the operations, in which none comes before another that had ended when it began, gives
    every client what it was told.

    Raises:
        Undecided: it is too tangled.
    """
    operations = sorted(history, key=lambda o: o.begun)
    complete = sum(1 << n for n, o in enumerate(operations) if o.complete)
    every = (1 << len(operations)) - 1
    # Bit n of `done`: operations[n] has taken effect. Depth first, the operation that ended first is tried first.
    stack: list[tuple[int, State]] = [(0, start)]
    seen: set[tuple[int, State]] = set()
    while stack:
        done, state = stack.pop()
        done = _with_observers(operations, every, done, state)
        if not complete & ~done:
            return True
        if (done, state) in seen:
            continue
        if len(seen) >= CONFIGURATIONS_MAX:
            raise Undecided(f"{len(operations)} operations, more than {CONFIGURATIONS_MAX:,} configurations")
        seen.add((done, state))
        candidates = _enabled(operations, every & ~done)
        candidates.sort(key=lambda n: operations[n].ended, reverse=True)
        for n in candidates:
            possible, after = operations[n].apply(state)
            if possible and (after != state or operations[n].complete):
                stack.append((done | 1 << n, after))
    return False


def _with_observers(operations: Sequence[Operation], every: int, done: int, state: State) -> int:
    """`done`, and all that can take effect now and never change a row: to let those wait never helps."""
    while True:
        before = done
        for n in _enabled(operations, every & ~done):
            operation = operations[n]
            if operation.observes and operation.apply(state)[0]:
                done |= 1 << n
        if done == before:
            return done


def _enabled(operations: Sequence[Operation], waiting: int) -> list[int]:
    """Those that no other one which waits had to precede. `operations` are in order of beginning."""
    found: list[int] = []
    first_end = NEVER
    while waiting:
        lowest = waiting & -waiting
        n = lowest.bit_length() - 1
        if operations[n].begun > first_end:
            break
        found.append(n)
        first_end = min(first_end, operations[n].ended)
        waiting ^= lowest
    return found

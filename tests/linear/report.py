"""A contradiction in a form that a person can read: what was done to the row around it, one operation a line, a bar for
its time. Called by __main__."""

from __future__ import annotations

from tests.linear.checker import Contradiction
from tests.linear.history import Kind, Operation, State, Told

_LINES = 24
_BAR = 32


def told(found: Contradiction, begun: str, unit: str) -> str:
    """The contradiction in words. `begun`: what the times are counted from."""
    culprit = found.culprit
    near = _near(found)
    low = min(o.begun for o in near)
    high = max(o.begun if not o.complete else o.ended for o in near)
    states = " or ".join(_state(s) for s in found.states) or "no state that a read could show"
    lines = [
        f"row {culprit.key}: no order of {len(found.history)} operations gives what the clients were told",
        f"  by the end of the marked one the row was {states}",
        f"  the {len(near)} operations around it; times in {unit} from {begun}:",
    ]
    for o in near:
        mark = ">" if o is culprit else " "
        ended = f"{o.ended:12.4f}" if o.complete else "           -"
        lines.append(
            f"{mark} {o.begun:12.4f} {ended} |{_bar(o, low, high)}| {o.client:10} {_words(o)}".rstrip()
        )
    return "\n".join(lines)


def _near(found: Contradiction) -> list[Operation]:
    """The last operations before the culprit, those without an answer that may matter, and the culprit."""
    lines = sorted(found.history, key=lambda o: (o.ended if o.complete else o.begun, o.begun))
    writers = [o for o in lines if o.value is not None and o.value == found.culprit.value]
    near = {id(o): o for o in (*writers[-4:], *lines[-_LINES:], found.culprit)}
    return sorted(near.values(), key=lambda o: (o.begun, o.ended))


def _bar(operation: Operation, low: float, high: float) -> str:
    scale = (_BAR - 1) / (high - low) if high > low else 0.0
    first = round((operation.begun - low) * scale)
    if not operation.complete:
        return (" " * first + "?" * (_BAR - first))[:_BAR]
    last = max(first, round((operation.ended - low) * scale))
    return (" " * first + "=" * (last - first + 1)).ljust(_BAR)


def _words(o: Operation) -> str:
    if o.kind is Kind.READ:
        said = f"read {_state(o.value)}"
    elif o.kind in (Kind.DELETE, Kind.DELETE_IGNORE):
        said = o.kind.value
    elif o.kind is Kind.SWAP:
        said = f"swap {_state(o.expected)} for {_state(o.value)}"
    elif o.kind in (Kind.UPDATE, Kind.UPDATE_IGNORE) and o.value is not None:
        said = f"{o.kind.value} b={o.value[1]}"
    else:
        said = f"{o.kind.value} {_state(o.value)}"
    end = "" if o.told is Told.DONE else f": {o.told.value}"
    at = f" at {o.timestamp}" if o.timestamp else ""
    return f"{said}{end}{at}  {o.note}".rstrip()


def _state(state: State) -> str:
    return "absent" if state is None else f"({state[0]}, {state[1]})"

"""Makes the progress records of a driver, which CR status, events and command line show. Pure.

Remembers how fast copies go. Invariant: a record describes the present state of one step, and its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stele.driver.steps import NODE_STEPS, MoveLeader, Step, WaitCopy, next_title
from stele.model.errors import SteleError

_NODE = re.compile(r"\bnode ([0-9a-f]{8})\b")


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Replace the ids of nodes in a text by pod names. `names`: by the first eight digits of a node's UUID."""
    return _NODE.sub(lambda match: names.get(match[1], match[0]), text)


@dataclass(frozen=True, slots=True)
class LeadersMoved:
    """How many leaders moved to the node `target`."""

    target: str
    moved: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one step: of a tablet, of a whole node (`node_id`), or of neither.

    `eta_s` is None while unknown. `error`: why the step failed this time. `cause`: as `Step.cause`.
    """

    tablet_id: str
    table_name: str
    step: str
    kind: str
    reason: str
    next: str
    bytes_done: int = 0
    bytes_total: int = 0
    eta_s: float | None = None
    error: str = ""
    node_id: str = ""
    cause: str = ""
    leaders: LeadersMoved | None = None
    """Set if leaders leave `node_id` only to spread them."""

    @property
    def where(self) -> str:
        """The subject of the step, in words."""
        if self.tablet_id:
            return f"tablet {self.tablet_id[:8]} of {self.table_name}"
        return f"node {self.node_id[:8]}" if self.node_id else "all tablets"


def spreads_leaders(step: Step) -> bool:
    """Whether the step moves a leader only to spread leaders over the nodes."""
    return isinstance(step, MoveLeader) and not step.removes


def leader_records(
    moves: Iterable[tuple[Step, SteleError | None]], leader_of: Mapping[str, str]
) -> list[Progress]:
    """Records of moves that spread leaders, one for each pair of nodes. `leader_of`: leading nodes by tablet.

    A restart moves the leaders of many tablets. Single records of them would hide everything else.
    """
    pairs: dict[tuple[str, str], list[tuple[MoveLeader, SteleError | None]]] = {}
    for step, error in moves:
        if isinstance(step, MoveLeader):
            pair = (leader_of.get(step.tablet_id, ""), str(step.target_node))
            pairs.setdefault(pair, []).append((step, error))
    found = []
    for (source, target), done in sorted(pairs.items()):
        step, count = done[0][0], len(done)
        errors = [str(error) for _, error in done if error is not None]
        tablets = f"{count} tablets" if count != 1 else "1 tablet"
        reason = f"moves the leader of {tablets} to node {target[:8]}: {step.reason}"
        refused = f"{len(errors)} of {count} were not moved: {errors[0]}" if errors else ""
        kind = type(step).__name__
        found.append(
            Progress(
                "",
                "",
                step.title,
                kind,
                reason,
                "",
                error=refused,
                node_id=source,
                cause=step.cause,
                leaders=LeadersMoved(target, count - len(errors)),
            )
        )
    return found


class Pace:
    """Remembers when each copy began and with how many bytes, to estimate its end."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], tuple[int, int]] = {}

    def record(self, step: Step, table_name: str, now_ms: int, error: str = "") -> Progress:
        """The record of a step at `now_ms`."""
        done = total = 0
        eta: float | None = None
        if isinstance(step, WaitCopy):
            done, total = step.bytes_done, step.bytes_total
            start_ms, start = self._first.setdefault((step.tablet_id, step.replica_id), (now_ms, done))
            if done > start and now_ms > start_ms:
                eta = (total - done) * (now_ms - start_ms) / (done - start) / 1000
        kind = type(step).__name__
        return Progress(
            step.tablet_id,
            table_name,
            step.title,
            kind,
            step.reason,
            next_title(step),
            done,
            total,
            eta,
            error,
            step.node_id if isinstance(step, NODE_STEPS) else "",
            step.cause,
        )

    def keep(self, copies: set[tuple[str, int]]) -> None:
        """Forget all copies but these."""
        self._first = {key: value for key, value in self._first.items() if key in copies}

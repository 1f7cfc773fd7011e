"""A tablet of a small cluster: its store, its leader, and the faults that wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stele.model.errors import SteleError
from stele.rpc.proto import common_pb2

Fault = Callable[[], SteleError | None]
"""Called before ("before", "before_read") or after ("after") a write is applied; an error it returns is the answer."""


@dataclass
class Tablet:
    """One tablet: its state machine, its leader, and what goes wrong next."""

    tablet_id: str
    table_id: str
    store: Any
    schema: Any
    partition: common_pb2.PartitionPB
    leader: int = 0
    term: int = 1
    heard: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # (term, leader) where a node knows no better
    index: int = 0
    incarnation: int = 0
    before: deque[Fault] = field(default_factory=deque)
    before_read: deque[Fault] = field(default_factory=deque)  # of a key
    after: deque[Fault] = field(default_factory=deque)
    attempts: list[Any] = field(
        default_factory=list
    )  # WriteRequest, or KvRequest of what changes a key space


def maybe_fail(faults: deque[Fault]) -> None:
    """Raise the error of the next fault, if there is one."""
    if faults:
        error = faults.popleft()()
        if error is not None:
            raise error

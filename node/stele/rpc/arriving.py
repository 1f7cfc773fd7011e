"""Frames that are under way: what a node holds of messages that are not whole yet. Event loop only; decides nothing about
whole ones, which are charged to the budget.

Made by `ClientStreams` and by `PeerInbound`, one for all connections of each. Past `pause_bytes` only the first frame in
line is read on, and those that hold little; the others wait in their kernels. Small messages come whole with one read and
meet none of this.

While others wait, the first in line has a turn of TURN_S. A frame that makes progress then goes to the end of the line and
keeps what it holds, so that a slow link delivers its message in several turns. One that brought less than TURN_BYTES_MIN is
closed, and so is one whose turn ends while more than `line_bytes` are held.

Invariants: what is held stays below `close_bytes` and what one read of each connection brings. One frame is always read on.
A frame that stands still is closed after STILL_S; while others wait for room, after TURN_STILL_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from stele.model.errors import Code, Retryable
from stele.rpc.channels import MESSAGE_BYTES_MAX

STILL_S = 10.0
TURN_STILL_S = 0.5
TURN_S = 2.0
_LOOK_S = 0.25
_LITTLE_BYTES = 64 << 10
"""A connection that holds no more than this is never paused: control messages are smaller."""
TURN_BYTES_MIN = 64 << 10
"""What a frame must bring in its turn. So no frame has more than 256 turns."""


class Source(Protocol):
    """A connection, as it is seen here."""

    def hold_back(self, on: bool) -> None:
        """Take nothing in for a while, or go on."""

    @property
    def reads(self) -> bool:
        """Whether its owner wants what comes in: else it stands still by the owner's doing."""

    def close(self, why: Exception | None = None) -> None:
        """End it."""


class _UnderWay:
    __slots__ = ("heard_s", "paused", "size")

    def __init__(self, now_s: float) -> None:
        self.size = 0
        self.heard_s = now_s
        self.paused = False


class _Turn:
    """Of the first frame in line, while others wait: when it began, and how much the frame held then."""

    __slots__ = ("began_s", "frame", "size")

    def __init__(self, frame: _UnderWay, now_s: float) -> None:
        self.frame = frame
        self.size = frame.size
        self.began_s = now_s


class Arriving:
    """`changed(delta)` is told by how many bytes more, or less, are held.

    A turn ends in the line while no more than `line_bytes` are held. `close_bytes` are one frame more: past them whoever
    brings more is closed.
    """

    def __init__(self, pause_bytes: int, changed: Callable[[int], None] = lambda delta: None) -> None:
        self.pause_bytes = pause_bytes
        self.line_bytes = pause_bytes + max(pause_bytes, MESSAGE_BYTES_MAX)
        self.close_bytes = self.line_bytes + MESSAGE_BYTES_MAX
        self.bytes = 0
        self._changed = changed
        # In line: those that began, or had a turn, earlier come first.
        self._frames: dict[Source, _UnderWay] = {}
        self._paused = 0
        self._turn: _Turn | None = None
        self._looked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def holds(self, source: Source, size: int) -> None:
        """Of a frame that is not whole, a connection now holds so many bytes; 0: of none, or it has ended."""
        frame = self._frames.get(source)
        if size == 0:
            if frame is not None:
                self._end(source, frame)
            return
        now_s = _now_s()
        if frame is not None and size < frame.size:  # it holds the beginning of the next one
            self._end(source, frame)
            frame = None
        if frame is None:
            frame = self._frames[source] = _UnderWay(now_s)
            self._watch(now_s)
        self._count(size - frame.size)
        frame.size, frame.heard_s = size, now_s
        if self.bytes > self.pause_bytes and size > _LITTLE_BYTES and not frame.paused:
            self._make_room(source, frame)

    def _make_room(self, source: Source, frame: _UnderWay) -> None:
        if self.bytes > self.close_bytes:
            source.close(
                Retryable(
                    f"{self.bytes} bytes of messages that are not whole yet are held, no more than {self.close_bytes} may "
                    "be; connect again a little later",
                    code=Code.THROTTLED,
                )
            )
        elif next(iter(self._frames)) is not source:
            self._pause(source, frame)

    def _pause(self, source: Source, frame: _UnderWay) -> None:
        if not self._paused:
            self._turn = None
        frame.paused = True
        self._paused += 1
        source.hold_back(True)

    def _end(self, source: Source, frame: _UnderWay) -> None:
        del self._frames[source]
        self._count(-frame.size)
        if frame.paused:
            self._go_on(source, frame)
        if self._paused:
            self._resume()

    def _count(self, delta: int) -> None:
        self.bytes += delta
        self._changed(delta)

    def _resume(self) -> None:
        """The first in line go on: one in any case, more where there is room."""
        for number, (source, frame) in enumerate(list(self._frames.items())):
            if number and self.bytes > self.pause_bytes:
                return
            if frame.paused:
                self._go_on(source, frame)

    def _go_on(self, source: Source, frame: _UnderWay) -> None:
        frame.paused = False
        frame.heard_s = _now_s()
        self._paused -= 1
        source.hold_back(False)

    def _watch(self, now_s: float) -> None:
        if self._timer is None:
            self._looked_s = now_s
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = _now_s()
        if now_s - self._looked_s > 2 * _LOOK_S:  # it is we who did not listen
            self._turn = None
            for frame in self._frames.values():
                frame.heard_s = now_s
        for source, frame in self._end_of_turn(now_s) if self._paused else self._standing_still(now_s):
            source.close(
                Retryable(
                    f"a message stood still, or came too slowly while others waited, at {frame.size} bytes"
                )
            )
            if self._frames.get(source) is frame:
                self._end(source, frame)
        if self._frames:
            self._watch(now_s)

    def _standing_still(self, now_s: float) -> list[tuple[Source, _UnderWay]]:
        """Those to be closed while nobody waits."""
        self._turn = None
        return [(s, f) for s, f in self._frames.items() if s.reads and now_s - f.heard_s >= STILL_S]

    def _end_of_turn(self, now_s: float) -> list[tuple[Source, _UnderWay]]:
        """Those to be closed while others wait; a turn that is over is passed on."""
        source, first = next(iter(self._frames.items()))
        if self._turn is None or self._turn.frame is not first:
            self._turn = _Turn(first, now_s)
        still = [
            (s, f) for s, f in self._frames.items() if not f.paused and now_s - f.heard_s >= TURN_STILL_S
        ]
        if still or now_s - self._turn.began_s < TURN_S:
            return still
        if first.size - self._turn.size < TURN_BYTES_MIN or self.bytes > self.line_bytes:
            return [(source, first)]
        self._to_end_of_line(source, first)
        return []

    def _to_end_of_line(self, source: Source, frame: _UnderWay) -> None:
        self._frames[source] = self._frames.pop(source)
        self._turn = None
        self._pause(source, frame)
        self._resume()


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""Bounds the memory for frames that have not arrived completely. Event loop only. Whole frames are charged to
the budget.

`ClientStreams` and `PeerInbound` each make one for all their connections. Past `pause_bytes`, only the first
frame in line and connections that hold little are read; the others wait in their kernels. Small messages
arrive whole with one read and are never affected.

While others wait, the first in line has a turn of TURN_S. If it makes progress, it then goes to the end of
the line and keeps its bytes. So a slow link delivers its message in several turns. A frame that brought less
than TURN_BYTES_MIN in its turn is closed. So is one whose turn ends while more than `line_bytes` are held.

Invariants: the held bytes stay below `close_bytes` plus one read of each connection. At least one frame is
always read. A frame without progress is closed after STILL_S, or after TURN_STILL_S while others wait for
room.
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
"""A connection that holds no more than this is never paused. Control messages are smaller."""
TURN_BYTES_MIN = 64 << 10
"""The least that a frame must bring in its turn. So no frame has more than 256 turns."""


class Source(Protocol):
    """What this module needs of a connection."""

    def hold_back(self, on: bool) -> None:
        """Stop or resume reading."""

    @property
    def reads(self) -> bool:
        """Whether its owner wants to read. If not, the connection stands still because of the owner."""

    def close(self, why: Exception | None = None) -> None:
        """End the connection."""


class _UnderWay:
    __slots__ = ("heard_s", "paused", "size")

    def __init__(self, now_s: float) -> None:
        self.size = 0
        self.heard_s = now_s
        self.paused = False


class _Turn:
    """The turn of the first frame in line, while others wait: when it began, and the bytes that the frame
    held then."""

    __slots__ = ("began_s", "frame", "size")

    def __init__(self, frame: _UnderWay, now_s: float) -> None:
        self.frame = frame
        self.size = frame.size
        self.began_s = now_s


class Arriving:
    """The incomplete frames of several connections. Calls `changed(delta)` when the number of held bytes
    changes.

    A frame whose turn ends goes to the end of the line if at most `line_bytes` are held; otherwise its
    connection is closed. `close_bytes` is one frame more. While more bytes than that are held, a connection
    that brings more is closed.
    """

    def __init__(self, pause_bytes: int, changed: Callable[[int], None] = lambda delta: None) -> None:
        self.pause_bytes = pause_bytes
        self.line_bytes = pause_bytes + max(pause_bytes, MESSAGE_BYTES_MAX)
        self.close_bytes = self.line_bytes + MESSAGE_BYTES_MAX
        self.bytes = 0
        self._changed = changed
        # In line order: those that began, or had a turn, earlier come first.
        self._frames: dict[Source, _UnderWay] = {}
        self._paused = 0
        self._turn: _Turn | None = None
        self._looked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def holds(self, source: Source, size: int) -> None:
        """A connection now holds `size` bytes of an incomplete frame; 0: none, or it has ended."""
        frame = self._frames.get(source)
        if size == 0:
            if frame is not None:
                self._end(source, frame)
            return
        now_s = _now_s()
        if frame is not None and size < frame.size:  # the bytes belong to the next frame
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
                    f"{self.bytes} bytes of incomplete messages are held; the limit is {self.close_bytes}; "
                    "connect again a little later",
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
        """Let the first in line continue: at least one, and more if there is room."""
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
        if now_s - self._looked_s > 2 * _LOOK_S:  # this process itself was held up
            self._turn = None
            for frame in self._frames.values():
                frame.heard_s = now_s
        for source, frame in self._end_of_turn(now_s) if self._paused else self._standing_still(now_s):
            source.close(
                Retryable(f"a message arrived too slowly: it stopped at {frame.size} bytes; send it again")
            )
            if self._frames.get(source) is frame:
                self._end(source, frame)
        if self._frames:
            self._watch(now_s)

    def _standing_still(self, now_s: float) -> list[tuple[Source, _UnderWay]]:
        """Return the frames to close while no other frame waits: nothing of them has come for STILL_S."""
        self._turn = None
        return [(s, f) for s, f in self._frames.items() if s.reads and now_s - f.heard_s >= STILL_S]

    def _end_of_turn(self, now_s: float) -> list[tuple[Source, _UnderWay]]:
        """While others wait: end the first frame's turn if its time is over. Return the frames whose
        connections must be closed, because they stand still or brought too little in their turn."""
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

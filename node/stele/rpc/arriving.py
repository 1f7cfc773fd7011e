"""Frames that are under way: what a node holds of messages that are not whole yet. Event loop only; decides nothing about
whole ones, which are charged to the budget.

Made by `ClientStreams` and by `PeerInbound`, one for all connections of each. Past `pause_bytes` only the frame that began
first is read on, and those that hold little; the others wait in their kernels. Small messages come whole with one read and
meet none of this.

Invariants: what is held stays below `pause_bytes`, one frame, and what one read of each connection brings; past
`close_bytes` whoever brings more is closed. One frame is always read on. A frame that stands still is closed after STILL_S;
while others wait for room, after YIELD_STILL_S, and the one that began first after YIELD_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from stele.model.errors import Code, Retryable
from stele.rpc.channels import MESSAGE_BYTES_MAX

STILL_S = 10.0
YIELD_STILL_S = 0.5
YIELD_S = 2.0
_LOOK_S = 0.25
_LITTLE_BYTES = 64 << 10
"""A connection that holds no more than this is never paused: control messages are smaller."""


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
    __slots__ = ("began_s", "heard_s", "paused", "size")

    def __init__(self, now_s: float) -> None:
        self.size = 0
        self.began_s = self.heard_s = now_s
        self.paused = False


class Arriving:
    """`changed(delta)` is told by how many bytes more, or less, are held."""

    def __init__(self, pause_bytes: int, changed: Callable[[int], None] = lambda delta: None) -> None:
        self.pause_bytes = pause_bytes
        self.close_bytes = 2 * pause_bytes + MESSAGE_BYTES_MAX
        self.bytes = 0
        self._changed = changed
        self._frames: dict[Source, _UnderWay] = {}  # the one that began first is the first
        self._paused = 0
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
        """Those that began first go on first: one in any case, more where there is room."""
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
            for frame in self._frames.values():
                frame.heard_s = frame.began_s = now_s
        for source, frame in self._too_slow(now_s):
            source.close(
                Retryable(
                    f"a message stood still, or came too slowly while others waited, at {frame.size} bytes"
                )
            )
            if self._frames.get(source) is frame:
                self._end(source, frame)
        if self._frames:
            self._watch(now_s)

    def _too_slow(self, now_s: float) -> list[tuple[Source, _UnderWay]]:
        going = [(source, frame) for source, frame in self._frames.items() if not frame.paused]
        if not self._paused:
            return [(s, f) for s, f in going if s.reads and now_s - f.heard_s >= STILL_S]
        still = [(s, f) for s, f in going if now_s - f.heard_s >= YIELD_STILL_S]
        return still or [(s, f) for s, f in going[:1] if now_s - f.began_s >= YIELD_S]


def _now_s() -> float:
    return asyncio.get_running_loop().time()

"""An event loop on the world's clock: production's coroutines, timers and callbacks run in it unchanged. Made
by SimNode, one for each life of a node; starts no thread and waits for nothing.

A turn begins a moment after something became ready, or when the node's stall ends. What arrives meanwhile
shares the turn.

Invariant: the order of all callbacks depends only on the world's seed; a closed loop runs nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.node import SimNode


class SimLoop(asyncio.AbstractEventLoop):
    """The part of asyncio's loop that replicas use: no sockets, no processes."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.closed = False
        self.broke: BaseException | None = None
        self._world = node.world
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled = False
        self._tasks: dict[asyncio.Task[Any], Coroutine[Any, Any, Any]] = {}

    # What asyncio requires of a loop

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.closed

    def is_closed(self) -> bool:
        return self.closed

    def time(self) -> float:
        """Seconds of the node's monotonic clock."""
        return self.node.clocks.monotonic_ms() / 1000

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._push(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(self.node.clocks.world_ms(when * 1000), self._fire, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = coro
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return self.node.host.blocking(func, *args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback raised. Reports of the garbage collector about tasks that a crash left behind are
        ignored."""
        if "handle" in context and self.broke is None:
            self.broke = context.get("exception")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return None

    # Turns

    def _push(self, handle: asyncio.Handle) -> None:
        if self.closed:
            return
        self._ready.append(handle)
        if not self._scheduled:
            self._scheduled = True
            world = self._world
            at = max(world.now + world.rng.random() * world.plan.turn_ms, self.node.stalled_until)
            world.at(at, self._turn)

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not self.closed and not handle.cancelled():
            self._push(handle)

    def _turn(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        if self._world.now < self.node.stalled_until:
            self._scheduled = True
            self._world.at(self.node.stalled_until, self._turn)
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            # What these callbacks add waits for the next turn, as in asyncio.
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if self.closed:
                    return
        finally:
            asyncio._set_running_loop(before)
        self.node.turned()

    def close(self) -> None:
        """The process is gone."""
        self.closed = True
        self._ready.clear()
        # Close them now. The garbage collector would find them at another moment in each run.
        for coroutine in self._tasks.values():
            with contextlib.suppress(Exception):
                coroutine.close()
        self._tasks.clear()


def running_node() -> SimNode | None:
    """The node whose code runs now."""
    loop = asyncio._get_running_loop()
    return loop.node if isinstance(loop, SimLoop) else None

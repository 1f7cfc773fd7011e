"""From a thread of Flight to the event loop and back. Used by the providers of the node's Flight server.

Invariant: a thread waits no longer than it said, however busy the loop is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from stele.model.errors import Code, Retryable

T = TypeVar("T")


def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run `work` on `loop`, from another thread, and give what it returns or raise what it raises.

    Raises:
        Retryable: TIMED_OUT after `timeout_s`.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        future.cancel()
        raise Retryable("the node did not get to this request in time", code=Code.TIMED_OUT) from None

"""Lets tasks resume one after another, each in a turn of the event loop of its own. Used by executor and
asking.

Beginning a call takes half a ms. If many tasks began calls in one turn, everything else in the loop would
wait: Kubernetes leases, probes, watches.
"""

from __future__ import annotations

import asyncio


class Turns:
    """Makes tasks that share this object resume one after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Wait for a turn of the event loop in which no other task of this object resumes."""
        async with self._lock:
            await asyncio.sleep(0)

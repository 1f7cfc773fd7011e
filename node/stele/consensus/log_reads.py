"""Reads entries of the log for a slow peer, and tries until that succeeds. Called by the runtime of a core.

It is a module of its own because it waits within a `try`. docs/compiled.md says why the runtime must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from stele.model.entry import Entry
from stele.model.errors import Retryable, SteleError

log = structlog.get_logger("stele.consensus")

_READ_AGAIN_S = 0.5


async def read_patiently(
    read: Callable[[], Awaitable[tuple[Entry, ...]]],
    wanted: Callable[[], bool],
    failed: Callable[[SteleError], None],
) -> tuple[Entry, ...] | None:
    """Call `read` until it succeeds, and return its result. Until then the core sends the peer nothing.

    Returns None in two cases. Another try cannot help, and `failed` was called with the error. Or the entries
    are no longer `wanted`.
    """
    while True:
        try:
            return await read()
        except Retryable as exc:
            log.warning("cannot read the log for a slow peer; trying again", error=str(exc))
        except SteleError as exc:
            failed(exc)
            return None
        except Exception:
            log.exception("cannot read the log for a slow peer; trying again")
        await asyncio.sleep(_READ_AGAIN_S)
        if not wanted():
            return None

"""Reads entries of the log for a slow peer, and tries until that succeeds. Called by the runtime of a core.

A module of its own: it waits within a `try`, and docs/compiled.md says why the runtime must not.
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
    """What `read` gives, however often it must be asked. The core sends the peer nothing before the answer.

    None: `failed` was called with an error that another try cannot help, or the entries are no longer `wanted`.
    """
    while True:
        try:
            return await read()
        except Retryable as exc:
            log.warning("the log could not be read; it is tried again", error=str(exc))
        except SteleError as exc:
            failed(exc)
            return None
        except Exception:
            log.exception("the log could not be read; it is tried again")
        await asyncio.sleep(_READ_AGAIN_S)
        if not wanted():
            return None

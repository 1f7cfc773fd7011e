"""Watch streams: JSON events of the changes after a version, filtered by a selector. Used by `http`; writes
no objects.

Invariants: a stream that starts at version V yields every later change of its selection once, in order, or
ends with 410. A bookmark comes after all changes that it covers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from stele_local.kinds import Kind
from stele_local.selection import Test
from stele_local.status import expired
from stele_local.store import Change, Store

Json = dict[str, Any]
BOOKMARK_SECONDS = 60.0
LAST_BOOKMARK_SECONDS = 2.0  # a bookmark is sent this long before a stream ends by its time-out
INITIAL_END = {"k8s.io/initial-events-end": "true"}


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of a watch. `version`: None or 0 begins with the existing objects. `initial`: send a bookmark
    after these.
    """

    namespace: str | None
    chosen: Test
    version: int | None
    timeout_seconds: float
    bookmarks: bool = False
    initial: bool = False


def _bookmark(kind: Kind, version: int, annotations: Json | None = None) -> Json:
    metadata: Json = {"resourceVersion": str(version)}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "type": "BOOKMARK",
        "object": {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata},
    }


def _event(change: Change, options: WatchOptions) -> Json | None:
    """The event of a change for this selection; None if the change is outside it. An object that leaves the
    selection counts as DELETED.
    """
    if options.namespace is not None and change.obj["metadata"].get("namespace", "") != options.namespace:
        return None
    held = change.before is not None and options.chosen(change.before)
    holds = not change.deleted and options.chosen(change.obj)
    if holds:
        return {"type": "MODIFIED" if held else "ADDED", "object": change.obj}
    if held:
        last = (
            change.obj
            if change.deleted
            else {
                **(change.before or {}),
                "metadata": {**(change.before or {})["metadata"], "resourceVersion": str(change.version)},
            }
        )
        return {"type": "DELETED", "object": last}
    return None


def _next_bookmark(now: float, deadline: float) -> float:
    last = deadline - LAST_BOOKMARK_SECONDS
    return min(now + BOOKMARK_SECONDS, last) if last > now else deadline + BOOKMARK_SECONDS


async def stream(
    store: Store, kind: Kind, options: WatchOptions, ended: Callable[[], bool]
) -> AsyncIterator[Json]:
    """The events of the watch, until the time-out, the end of the kind, or until `ended()` is true."""
    loop = asyncio.get_running_loop()
    queue = store.open_watch(kind.key)
    change: Change | None
    try:
        start = options.version
        if start and start < store.oldest(kind.key):
            refusal = expired(f"too old resource version: {start} ({store.oldest(kind.key)})")
            yield {"type": "ERROR", "object": refusal.body()}
            return
        version = (
            store.version
        )  # opened first, so that later writes reach the queue while the reader is still busy
        if not start:
            for obj in store.objects(kind.key, options.namespace):
                if options.chosen(obj):
                    yield {"type": "ADDED", "object": obj}
            if options.bookmarks and options.initial:
                yield _bookmark(kind, version, INITIAL_END)
        else:
            for change in store.since(kind.key, start):
                if event := _event(change, options):
                    yield event
        deadline = loop.time() + options.timeout_seconds
        bookmark_at = _next_bookmark(loop.time(), deadline)
        while not ended():
            until = min(deadline, bookmark_at) if options.bookmarks else deadline
            try:
                async with asyncio.timeout_at(until):
                    change = await queue.get()
            except TimeoutError:
                at = loop.time()  # may be well past the deadline if the loop was blocked
                if options.bookmarks and at >= bookmark_at:
                    if queue.empty():  # otherwise the changes that it covers must go first
                        yield _bookmark(kind, store.version)
                        bookmark_at = _next_bookmark(at, deadline)
                elif at >= deadline:
                    return
                continue
            if change is None:
                return
            if change.version > version and (event := _event(change, options)):
                yield event
    finally:
        store.close_watch(kind.key, queue)

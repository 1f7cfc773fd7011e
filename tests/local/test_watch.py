"""A watch stream by itself, its reader slow: what is written between two of its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stele_local.kinds import BUILT_IN
from stele_local.selection import parse_labels
from stele_local.store import Store
from stele_local.watch import WatchOptions, stream

CONFIG_MAP = next(kind for kind in BUILT_IN if kind.plural == "configmaps")


def put(store: Store, name: str) -> int:
    store.put(CONFIG_MAP.key, {"metadata": {"name": name, "namespace": "default"}})
    return store.version


def watch(store: Store, version: int | None, seconds: float = 0.2) -> AsyncIterator[dict[str, Any]]:
    options = WatchOptions("default", parse_labels(""), version, seconds)
    return stream(store, CONFIG_MAP, options, lambda: False)


async def test_a_write_while_older_changes_are_told_is_told_after_them() -> None:
    store = Store()
    begin = put(store, "before")
    for name in ("a", "b"):
        put(store, name)
    told = []
    async for event in watch(store, begin):
        told.append(event["object"]["metadata"]["name"])
        if told == ["a"]:  # the reader took its time with the first event
            put(store, "c")
    assert told == ["a", "b", "c"]


async def test_a_write_while_the_first_state_is_told_is_told_after_it() -> None:
    store = Store()
    put(store, "a")
    put(store, "b")
    told = []
    async for event in watch(store, None):
        told.append(event["object"]["metadata"]["name"])
        if told == ["a"]:
            put(store, "c")
    assert told == ["a", "b", "c"]


def bookmarks(store: Store, version: int, seconds: float) -> AsyncIterator[dict[str, Any]]:
    options = WatchOptions("default", parse_labels(""), version, seconds, bookmarks=True)
    return stream(store, CONFIG_MAP, options, lambda: False)


def version(event: dict[str, Any]) -> int:
    return int(event["object"]["metadata"]["resourceVersion"])


@pytest.mark.parametrize("still_s", [0.4, 2.4], ids=["until it is due", "until the watch ends"])
async def test_a_bookmark_comes_after_all_that_it_covers(still_s: float) -> None:
    """Also after what was written in the moment in which it fell due, and where the loop stood still so long that the watch ends."""
    store = Store()
    begin = put(store, "before")
    options = WatchOptions("default", parse_labels(""), begin, 2.2, bookmarks=True)  # due 2 s before its end
    events = stream(store, CONFIG_MAP, options, lambda: False)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # it waits for a change now
    loop = asyncio.get_running_loop()
    for after_s, name in ((0.3, "a"), (0.35, "b")):
        loop.call_later(after_s, put, store, name)
    time.sleep(still_s)  # noqa: ASYNC251 - a loop that stands still
    told = [await first]
    async for event in events:
        told.append(event)
    versions = [(e["type"], int(e["object"]["metadata"]["resourceVersion"])) for e in told]
    assert versions == [("ADDED", begin + 1), ("ADDED", begin + 2), ("BOOKMARK", begin + 2)]


async def test_a_watch_that_starts_before_what_is_remembered_is_told_so() -> None:
    """410: it would miss what fell out of the history, and never know."""
    store = Store(history_max=2)
    versions = [put(store, name) for name in ("a", "b", "c")]
    assert store.oldest(CONFIG_MAP.key) == versions[0]
    names = [change.obj["metadata"]["name"] for change in store.since(CONFIG_MAP.key, versions[0])]
    assert names == ["b", "c"]

"""A watch stream by itself, its reader slow: what is written between two of its events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

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

"""Objects, their versions, and the history that watches read. Knows nothing of kinds' rules or of HTTP.

Owns: the resourceVersion counter and the bounded history. Invariants: a stored object is never changed in
place, because readers share it. Versions only rise. A change is in the history before any watcher gets it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Table = tuple[str, str]  # (group, plural)
WATCH_QUEUE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Change:
    """One committed write. `before`: None for a creation. `deleted`: the object was deleted; `obj` then
    carries the version of the deletion.
    """

    version: int
    table: Table
    obj: Json
    before: Json | None
    deleted: bool


class Store:
    """All objects of one cluster, in memory. `keeper` writes them to disk."""

    def __init__(self, history_max: int = 4096) -> None:
        self._history_max = history_max
        self._tables: dict[Table, dict[tuple[str, str], Json]] = {}
        self._history: dict[Table, deque[Change]] = {}
        self._forgotten: dict[Table, int] = {}  # highest version that fell out of the table's history
        self._watchers: dict[Table, list[asyncio.Queue[Change | None]]] = {}
        self._listeners: list[Callable[[Change], None]] = []
        self.version = 1
        self._restored = 0  # versions up to this one were of an earlier process

    def restore(self, version: int, objects: Iterable[tuple[Table, Json]]) -> None:
        """Begin with the objects that an earlier process stored. No watch can resume from before `version`."""
        for table, obj in objects:
            metadata = obj["metadata"]
            self._tables.setdefault(table, {})[metadata.get("namespace", ""), metadata["name"]] = obj
        self.version = self._restored = version

    def get(self, table: Table, namespace: str, name: str) -> Json | None:
        return self._tables.get(table, {}).get((namespace, name))

    def objects(self, table: Table, namespace: str | None = None) -> list[Json]:
        """All objects, sorted by namespace and then name, as a real API server lists them."""
        rows = self._tables.get(table, {})
        return [rows[key] for key in sorted(rows) if namespace is None or key[0] == namespace]

    def everything(self) -> Iterator[tuple[Table, Json]]:
        for table, rows in self._tables.items():
            for obj in list(rows.values()):
                yield table, obj

    def put(self, table: Table, obj: Json) -> Json:
        """Store `obj` under a new version. The caller must not change `obj` afterwards."""
        metadata = obj["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        rows = self._tables.setdefault(table, {})
        before = rows.get(key)
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        rows[key] = obj
        self._commit(Change(self.version, table, obj, before, False))
        return obj

    def remove(self, table: Table, obj: Json) -> Json:
        metadata = obj["metadata"]
        before = self._tables[table].pop((metadata.get("namespace", ""), metadata["name"]))
        self.version += 1
        last = {**obj, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        self._commit(Change(self.version, table, last, before, True))
        return last

    def open_table(self, table: Table) -> None:
        """Begin to serve a kind. Its watches cannot start at versions older than the present one."""
        self._forgotten.setdefault(table, self.version)

    def drop_table(self, table: Table) -> None:
        """Stop serving a kind, and end its watches."""
        self._tables.pop(table, None)
        self._history.pop(table, None)
        self._forgotten.pop(table, None)
        for queue in self._watchers.pop(table, []):
            queue.put_nowait(None)

    def _commit(self, change: Change) -> None:
        history = self._history.setdefault(change.table, deque())
        history.append(change)
        if len(history) > self._history_max:
            self._forgotten[change.table] = history.popleft().version
        for queue in list(self._watchers.get(change.table, ())):
            if queue.qsize() >= WATCH_QUEUE_MAX:  # this watcher does not read; if it returns it gets 410
                self._watchers[change.table].remove(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(change)
        for listener in self._listeners:
            listener(change)

    def forget_history(self) -> None:
        """Compact the history: no watch can resume from a version older than the present one."""
        for table, history in self._history.items():
            if history:
                self._forgotten[table] = history[-1].version
                history.clear()

    def oldest(self, table: Table) -> int:
        """The lowest version from which a watch can resume."""
        return max(self._restored, self._forgotten.get(table, 0))

    def since(self, table: Table, version: int) -> list[Change]:
        """Changes after `version`, which must not be lower than `oldest`."""
        return [change for change in self._history.get(table, ()) if change.version > version]

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` after each write. It runs inside the write, so it must be quick and must not write."""
        self._listeners.append(listener)

    def open_watch(self, table: Table) -> asyncio.Queue[Change | None]:
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        self._watchers.setdefault(table, []).append(queue)
        return queue

    def close_watch(self, table: Table, queue: asyncio.Queue[Change | None]) -> None:
        if queue in self._watchers.get(table, ()):
            self._watchers[table].remove(queue)

    def end_watches(self) -> None:
        for queues in self._watchers.values():
            for queue in queues:
                queue.put_nowait(None)

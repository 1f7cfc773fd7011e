"""The sequence of changes of the cluster view, and the pages that carry them. Made by master.py for each
leadership.

Each tablet (with its intent) and each table is a unit. Each unit has the number of its last change. A page
holds the units that changed after a given number, oldest first, each as it is now. The last page also has
nodes, claim and policy. So a caller that applied all pages up to the last one has the view of one moment.

Invariants: a change gives its unit a new number before the event loop turns. No page has much more than
PAGE_BYTES_MAX, not counting the nodes. At most STEP_UNITS units are built before the event loop runs again.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import Callable
from itertools import islice

from stele.driver.keeping import whole_view
from stele.master.catalog import GONE_TABLES
from stele.master.cluster_view import (
    Scene,
    changes_by_itself_ms,
    check_message,
    intent_to_pb,
    table_info,
    view_head,
    view_nodes,
    view_tablet,
)
from stele.master.records import INTENT_PREFIX, RECOVERY_PREFIX, TABLE_PREFIX, TABLET_PREFIX
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2

PAGE_BYTES_MAX = 512 << 10
"""A page ends with the unit that passes this size. Nodes come on top, with at most a few hundred bytes each.
"""
STEP_UNITS = 16
"""The most units that are built in one step of the event loop: some 1 ms."""
LOAD_UNITS = 256
"""The most units that are numbered in one step of the event loop: some 2 ms."""
GONE_KEPT = 10_000
"""How many deleted units are remembered. A caller that has missed more gets the whole view again."""

_TABLET, _TABLE = "t/", "n/"


class ViewChanges:
    """The changes of the view during one leadership. `scene`: as `Master.scene`."""

    def __init__(self, scene: Callable[[], Scene]) -> None:
        self._scene = scene
        now = scene()
        self._catalog, self._liveness = now.catalog, now.liveness
        self.epoch = secrets.randbits(61) or 1
        self._sequence = 0
        self._floor = 0
        """The number of the newest deletion that is no longer remembered."""
        self._changed: dict[str, int] = {}
        """The number of each unit's last change, in rising order."""
        self._due: list[tuple[int, str]] = []
        """When tablets change because time passes, without a report."""
        self._full: dict[str, tuple[bool, int]] = {}
        """The last known state of each node's full report."""
        self._peers: dict[str, tuple[str, ...]] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        """Tablets by the nodes in their configurations, without the catalog's own."""
        self._catalog.on_change(self._row)
        self._liveness.on_report = self._reported

    async def load(self) -> None:
        """Number all existing units. Until this returns, no page may be requested."""
        for number, tablet_id in enumerate(list(self._catalog.current)):
            if number % LOAD_UNITS == LOAD_UNITS - 1:
                await asyncio.sleep(0)
            self._place(tablet_id)
            self._touch(_TABLET + tablet_id)
        for table in self._catalog.live_tables:
            self._touch(_TABLE + table.table_id)

    def end(self) -> None:
        """Stop following changes."""
        self._catalog.no_more_changes(self._row)
        self._liveness.on_report = None

    # --- what changes ---

    def _touch(self, key: str) -> None:
        self._changed.pop(key, None)
        self._sequence += 1
        self._changed[key] = self._sequence

    def _row(self, key: bytes) -> None:
        """Note that a row of the catalog changed."""
        if key.startswith(TABLET_PREFIX):
            tablet_id = key[len(TABLET_PREFIX) :].decode()
            self._place(tablet_id)
            self._touch(_TABLET + tablet_id)
            row = self._catalog.tablets.get(tablet_id)
            if row is not None and row.table_id in self._catalog.tables:
                self._touch(_TABLE + row.table_id)
        elif key.startswith(INTENT_PREFIX):
            self._touch(_TABLET + key[len(INTENT_PREFIX) :].decode())
        elif key.startswith(RECOVERY_PREFIX):
            self._reported(key[len(RECOVERY_PREFIX) :].decode().partition("/")[0])
        elif key.startswith(TABLE_PREFIX):
            table_id = key[len(TABLE_PREFIX) :].decode()
            self._touch(_TABLE + table_id)
            for tablet_id in self._catalog.tablets_of.get(table_id, ()):
                self._reported(tablet_id)  # they show its name and its replication factor

    def _reported(self, tablet_id: str) -> None:
        """Note that a replica's report came or went."""
        if tablet_id in self._catalog.current:
            self._touch(_TABLET + tablet_id)

    def _place(self, tablet_id: str) -> None:
        if tablet_id == CATALOG_TABLET_ID:
            return
        for node_id in self._peers.pop(tablet_id, ()):
            self._on_node[node_id].pop(tablet_id, None)
        if tablet_id in self._catalog.current:
            peers = tuple(p.node_id for p in self._catalog.tablets[tablet_id].config.peers)
            self._peers[tablet_id] = peers
            for node_id in peers:
                self._on_node.setdefault(node_id, {})[tablet_id] = None

    async def _pass_time(self) -> Scene:
        """Record the changes that need no row or report: replicas that now count as missing, or no longer do."""
        for node_id, life in list(self._liveness.nodes.items()):
            full = (life.full, life.full_since_ms)
            if self._full.get(node_id) != full:
                self._full[node_id] = full
                for tablet_id, peer in self._members_on(node_id):
                    if self._liveness.report(tablet_id, node_id, peer) is None:
                        self._reported(tablet_id)
                await asyncio.sleep(0)
        scene = self._scene()
        while self._due and self._due[0][0] <= scene.now_ms:
            self._reported(heapq.heappop(self._due)[1])
        return scene

    def _members_on(self, node_id: str) -> list[tuple[str, int]]:
        found = []
        for tablet_id in self._on_node.get(node_id, ()):
            peer = self._catalog.tablets[tablet_id].config.peer_on(node_id)
            if peer is not None:
                found.append((tablet_id, int(peer.replica_id)))
        return found

    # --- the pages ---

    async def page(self, since: master_pb2.ViewPlacePB, cluster_id: str) -> master_pb2.GetClusterViewResponse:
        """The next page of changes after the number `since`."""
        scene = await self._pass_time()
        self._forget()
        known = since.epoch == self.epoch and self._floor <= since.sequence <= self._sequence
        upto = since.sequence if known else 0
        found = master_pb2.GetClusterViewResponse(anew=not known, now_ms=scene.now_ms)
        size = 0
        for number, (key, change) in enumerate(self._after(upto)):
            if number % STEP_UNITS == STEP_UNITS - 1:
                await asyncio.sleep(0)
            if self._changed.get(key) != change:
                continue  # it has changed again meanwhile, so it comes later
            size += self._add(found, scene, key)
            upto = change
            if size >= PAGE_BYTES_MAX:
                break
        found.more = upto < next(reversed(self._changed.values()), 0)
        found.upto.epoch, found.upto.sequence = self.epoch, upto
        if not found.more:
            # Its configuration, term and leader come from its own log, whose changes nobody counts.
            self._add(found, scene, _TABLET + CATALOG_TABLET_ID)
            found.nodes.extend(view_nodes(scene, self._counts(scene)))
        view_head(found, scene, cluster_id)
        return found

    async def whole(self, cluster_id: str) -> master_pb2.GetClusterViewResponse:
        """The whole view as one message, for callers that do not ask for pages.

        Raises:
            Rejected: TOO_LARGE, it does not fit into a message.
        """
        size = 0

        async def page(since: master_pb2.ViewPlacePB) -> master_pb2.GetClusterViewResponse:
            nonlocal size
            found = await self.page(since, cluster_id)
            size += found.ByteSize()
            check_message(size)
            return found

        found = await whole_view(page)
        for field in ("upto", "anew", "now_ms"):
            found.ClearField(field)
        return found

    def _after(self, sequence: int) -> list[tuple[str, int]]:
        """The units that changed after this number, oldest change first."""
        count = 0
        for change in reversed(self._changed.values()):
            if change <= sequence:
                break
            count += 1
        found = list(islice(reversed(self._changed.items()), count))
        found.reverse()
        return found

    def _add(self, page: master_pb2.GetClusterViewResponse, scene: Scene, key: str) -> int:
        """Put a unit into a page. Returns its bytes."""
        catalog, name = self._catalog, key[len(_TABLET) :]
        if key.startswith(_TABLE):
            table = catalog.tables.get(name)
            if table is None or table.state in GONE_TABLES:
                page.gone_tables.append(id_to_pb(name))
                return len(name)
            told = table_info(scene, table)
            page.tables.append(told)
            return told.ByteSize()
        size = len(name)
        if name in catalog.current:
            row = catalog.tablets[name]
            tablet = view_tablet(scene, row)
            page.tablets.append(tablet)
            size += tablet.ByteSize()
            due_ms = changes_by_itself_ms(scene, row)
            if due_ms is not None:
                heapq.heappush(self._due, (due_ms, name))
        else:
            page.gone_tablets.append(id_to_pb(name))
        if (intent := catalog.intents.get(name)) is not None:
            told_intent = intent_to_pb(intent)
            page.intents.append(told_intent)
            size += told_intent.ByteSize()
        return size

    def _counts(self, scene: Scene) -> dict[str, int]:
        """How many replicas configurations give to each node."""
        counts = {node_id: len(tablets) for node_id, tablets in self._on_node.items()}
        if (row := self._catalog.catalog_tablet) is not None:
            for peer in scene.config(row).peers:
                counts[peer.node_id] = counts.get(peer.node_id, 0) + 1
        return counts

    def _forget(self) -> None:
        """Forget the older half of the deleted units, once there are many."""
        catalog = self._catalog
        alive = len(catalog.current) + len(catalog.tables)
        if len(self._changed) <= alive + GONE_KEPT:
            return
        gone = [key for key in self._changed if not self._is_there(key)]
        for key in gone[: len(gone) - GONE_KEPT // 2]:
            self._floor = max(self._floor, self._changed.pop(key))

    def _is_there(self, key: str) -> bool:
        name = key[len(_TABLET) :]
        if key.startswith(_TABLE):
            return name in self._catalog.tables
        return name in self._catalog.current or name in self._catalog.intents

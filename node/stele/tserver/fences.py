"""What orders this node refuses because a newer leader or driver was heard. Owned by the node; asked by its services.

An order of a master carries the catalog's (term, index), one of a driver its claim's epoch. Newest terms and epochs are
also learned from the leader master's heartbeats. node.json keeps what must survive a restart: a term or an epoch when
it rises, which is once per election or take-over, and the OpId of an order that erases a replica for good, because
nothing else would be left to refuse a late order that made it again.

Invariant: an order is carried out only if none of a newer term or epoch was heard, and none with a newer index for its
tablet, and what it raised survives power loss before anything is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from stele.model.errors import Code, Rejected
from stele.model.ids import OPID_NONE, OpId, TabletId
from stele.tserver.volume import Volume

_TABLETS_MAX = 20_000


@dataclass(slots=True)
class _Known:
    term: int
    epoch: int
    erased: OpId


class Fences:
    """One node's. `in_thread(work, *arguments)` runs what blocks."""

    def __init__(self, volume: Volume, in_thread: Callable[..., Awaitable[Any]]) -> None:
        record = volume.record
        self._volume = volume
        self._in_thread = in_thread
        self._floor = record.catalog
        """Orders before this one are refused for all tablets: what they were about may be erased since."""
        self._known = _Known(record.catalog.term, record.driver_epoch, record.catalog)
        self._newest: dict[TabletId, OpId] = {}

    def learned(self, term: int, epoch: int) -> None:
        """From the leader master's answer to a heartbeat."""
        self._known.term = max(self._known.term, term)
        self._known.epoch = max(self._known.epoch, epoch)

    async def check_epoch(self, epoch: int) -> None:
        """Refuse orders of a driver whose claim was taken over; 0 is an administrator.

        Raises:
            Rejected: STALE_EPOCH.
        """
        if epoch and epoch < self._known.epoch:
            raise Rejected(
                f"driver epoch {epoch}; epoch {self._known.epoch} was already heard: another driver took over",
                code=Code.STALE_EPOCH,
            )
        self._known.epoch = max(self._known.epoch, epoch)
        await self._keep()

    async def check_catalog(self, tablet_id: TabletId, opid: OpId, *, erases: bool = False) -> None:
        """Refuse orders of a catalog leader that was replaced, and older ones about the same tablet.

        Orders about different tablets may overtake each other. OPID_NONE is an administrator. `erases`: the order
        takes away whatever would refuse a late one.

        Raises:
            Rejected: STALE_EPOCH.
        """
        if opid == OPID_NONE:
            return
        heard = max(self._newest.get(tablet_id, OPID_NONE), self._floor, OpId(self._known.term, 0))
        if opid < heard:
            raise Rejected(
                f"tablet {tablet_id}: an order from catalog {opid}; {heard} was already heard",
                code=Code.STALE_EPOCH,
            )
        self._known.term = max(self._known.term, opid.term)
        if len(self._newest) >= _TABLETS_MAX and tablet_id not in self._newest:
            self._newest.pop(next(iter(self._newest)))
        self._newest[tablet_id] = opid
        if erases:
            self._known.erased = max(self._known.erased, opid)
        await self._keep()

    async def _keep(self) -> None:
        record, known = self._volume.record, self._known
        if (
            known.term > record.catalog.term
            or known.epoch > record.driver_epoch
            or known.erased > record.catalog
        ):
            catalog = max(OpId(known.term, 0), known.erased)
            await self._in_thread(self._volume.raise_fences, catalog, known.epoch)

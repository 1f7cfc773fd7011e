"""Refuses orders of masters and drivers that a newer one has replaced. Owned by the node; asked by its
services.

An order of a master carries the catalog's (term, index). An order of a driver carries its claim's epoch.
Heartbeats of the leading master carry the newest term and epoch. node.json keeps what must survive a restart:
- the newest term and epoch, written when one rises, which is once per election or take-over;
- the OpId of an order that erases a replica for good. Otherwise a late order could make the replica again.

The term, index or epoch of an order becomes the newest known one only after the order was carried out. It may
exceed the newest known one by FENCE_STEP_MAX at most. Otherwise one order with a huge number would shut out
all others for good.

Invariant: an order is carried out only if no order or heartbeat has brought a newer term or epoch. Nor may
one have brought a newer index for its tablet. If the order makes its own numbers the newest, they are durable
before it is answered. For an order that erases, they are durable before anything is erased.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stele.consensus.ports import InThread
from stele.model.bounds import EPOCH_MAX, FENCE_STEP_MAX, TERM_JUMP_MAX, TERM_MAX
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OPID_NONE, OpId, TabletId
from stele.tserver.volume import Volume

_TABLETS_MAX = 20_000


@dataclass(slots=True)
class _Known:
    term: int
    epoch: int
    erased: OpId


class Fences:
    """The terms, epochs and orders that one node has heard of."""

    def __init__(self, volume: Volume, in_thread: InThread) -> None:
        record = volume.record
        self._volume = volume
        self._in_thread = in_thread
        self._floor = record.catalog
        """Orders below this OpId are refused for every tablet, because their tablet may have been erased
        since.
        """
        self._known = _Known(record.catalog.term, record.driver_epoch, record.catalog)
        self._newest: dict[str, OpId] = {}
        self._under_way: list[Order] = []

    def learned(self, term: int, epoch: int) -> None:
        """Take the newest term and epoch from the leading master's answer to a heartbeat. They follow a huge
        leap in steps, one per heartbeat.
        """
        known = self._known
        known.term = max(known.term, min(term, known.term + TERM_JUMP_MAX, TERM_MAX))
        known.epoch = max(known.epoch, min(epoch, known.epoch + TERM_JUMP_MAX, EPOCH_MAX))

    def of_driver(self, epoch: int) -> Order:
        """Admit an order of a driver, to be carried out within `with`. Epoch 0: the order of an
        administrator.

        Raises:
            Rejected: STALE_EPOCH, another driver has taken over the claim.
            Retryable: NOT_READY, the epoch is far above all that this node has heard of.
        """
        order = Order(self, epoch=epoch)
        if epoch:
            known = max(self._known.epoch, *(other.epoch for other in self._under_way), 0)
            if epoch < known:
                raise Rejected(
                    f"this order is of driver epoch {epoch}, but this node has heard of epoch {known}: "
                    f"another driver took over",
                    code=Code.STALE_EPOCH,
                )
            _refuse_leap("driver epoch", epoch, self._known.epoch)
        return order

    def of_catalog(self, tablet_id: TabletId, opid: OpId) -> Order:
        """Admit an order of a master about a tablet, to be carried out within `with`. OPID_NONE: the order of
        an administrator.

        Orders about different tablets may overtake each other.

        Raises:
            Rejected: STALE_EPOCH, that catalog leader was replaced, or a newer order about the tablet was
                carried out.
            Retryable: NOT_READY, the term is far above all that this node has heard of.
        """
        order = Order(self, tablet_id=tablet_id, opid=opid)
        if opid != OPID_NONE:
            others = [other.opid for other in self._under_way]
            terms = [OpId(other.term, 0) for other in others]
            same = [other.opid for other in self._under_way if other.tablet_id == tablet_id]
            known = self._newest.get(tablet_id, OPID_NONE)
            heard = max(known, self._floor, OpId(self._known.term, 0), *terms, *same)
            if opid < heard:
                raise Rejected(
                    f"tablet {tablet_id[:8]}: this order is from catalog {opid}, but this node has heard of "
                    f"{heard}; ask the leading master",
                    code=Code.STALE_EPOCH,
                )
            _refuse_leap("catalog term", opid.term, self._known.term)
        return order

    def _begin(self, order: Order) -> None:
        self._under_way.append(order)

    def _end(self, order: Order, cut_off: bool) -> None:
        self._under_way.remove(order)
        if cut_off:  # its caller went away, but the order continues
            self._raise(order)

    def _raise(self, order: Order) -> None:
        self._known.epoch = max(self._known.epoch, order.epoch)
        if order.opid != OPID_NONE:
            self._known.term = max(self._known.term, order.opid.term)
            self._note(order)

    def _note(self, order: Order) -> None:
        if len(self._newest) >= _TABLETS_MAX and order.tablet_id not in self._newest:
            self._newest.pop(next(iter(self._newest)))
        self._newest[order.tablet_id] = max(order.opid, self._newest.get(order.tablet_id, OPID_NONE))

    async def _carried_out(self, order: Order) -> None:
        self._raise(order)
        await self._keep()

    async def _erases(self, order: Order) -> None:
        self._known.erased = max(self._known.erased, order.opid)
        await self._carried_out(order)

    async def _keep(self) -> None:
        record, known = self._volume.record, self._known
        if (
            known.term > record.catalog.term
            or known.epoch > record.driver_epoch
            or known.erased > record.catalog
        ):
            catalog = max(OpId(known.term, 0), known.erased)
            await self._in_thread(self._volume.raise_fences, catalog, known.epoch)


class Order:
    """An order that no newer one has replaced. While it is under way, within `with`, older orders are
    refused.
    """

    __slots__ = ("_fences", "epoch", "opid", "tablet_id")

    def __init__(
        self, fences: Fences, *, epoch: int = 0, tablet_id: str = "", opid: OpId = OPID_NONE
    ) -> None:
        self._fences = fences
        self.epoch = epoch
        self.tablet_id = tablet_id
        self.opid = opid

    def __enter__(self) -> Order:
        self._fences._begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._fences._end(self, kind is not None and issubclass(kind, asyncio.CancelledError))

    async def carried_out(self) -> None:
        """Refuse older orders from now on, after a restart too: this order changed something."""
        await self._fences._carried_out(self)

    def found_nothing(self) -> None:
        """Refuse older orders about this tablet until a restart: this order found nothing to change.

        Otherwise a late order could make again what this order was to remove.
        """
        if self.opid != OPID_NONE:
            self._fences._note(self)

    async def erases(self) -> None:
        """Refuse older orders before this one erases a replica, so that none makes the replica again."""
        await self._fences._erases(self)


def _refuse_leap(what: str, number: int, heard: int) -> None:
    if number > heard + FENCE_STEP_MAX:
        raise Retryable(
            f"{what} {number}: this node knows {heard} and accepts at most {FENCE_STEP_MAX} more; it learns "
            f"the newest from its next heartbeat, so try again",
            code=Code.NOT_READY,
        )

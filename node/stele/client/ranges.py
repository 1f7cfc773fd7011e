"""The ranges of an open table, as they are added and dropped. Used by table.py, batcher.py and bulk.py.

Invariants: before a row is refused because no range covers it, the masters are asked. That question begins
after the row was given. A writer deals out all rows that wait by one partitioning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stele.client.locations import Locations, TabletPlace
from stele.model.partition import PartitionSchema, dropped_ordinals, may_be_outside, prune
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema

NO_RANGE = "no range of the table covers this row; add one with `stele table alter --add-range`"


@dataclass(frozen=True, slots=True)
class Ranges:
    """How a table is split, by the last answer of the masters."""

    locations: Locations

    @property
    def now(self) -> PartitionSchema:
        """The present partitioning: the same object until it changes."""
        return self.locations.info.partition_schema

    async def ask(self, timeout_s: float) -> None:
        """Ask the masters for the present ranges.

        Raises:
            Rejected: NOT_FOUND: the table is gone.
            Retryable: TIMED_OUT: no answer came within `timeout_s`; other codes: no master answers.
            Closed: after `close`.
        """
        await self.locations.ask_anew(timeout_s=timeout_s)

    def places(self, schema: Schema, spec: ScanSpec) -> tuple[TabletPlace, ...]:
        """Return the tablets that may hold rows of the scan.

        Raises:
            Rejected: NOT_FOUND: the table was deleted.
            Retryable: NOT_READY: one is still being created.
        """
        return tuple(self.locations.by_ordinal(prune(self.now, *_wanted(schema, spec))))

    async def places_now(
        self, schema: Schema, spec: ScanSpec, gone: bool, timeout_s: float
    ) -> tuple[TabletPlace, ...]:
        """As `places`. If a row of the scan may be outside all known ranges, ask the masters first: somebody
        may have added its range.

        `gone`: a range was dropped, and the masters were just asked. Raises what `ask` and `places` raise."""
        if not gone and may_be_outside(self.now, *_wanted(schema, spec)):
            await self.ask(timeout_s)
        return self.places(schema, spec)


class RangesInForce:
    """The partitioning by which a writer deals its rows out, and the newer one that it waits for.

    A newer one takes effect once no block for a tablet that it drops is in flight. `ranges` None: it never changes."""

    def __init__(self, partitioning: PartitionSchema, ranges: Ranges | None) -> None:
        self.partitioning = partitioning
        self.dropped: frozenset[int] = frozenset()  # tablets without a range in the newer one
        self._next = partitioning
        self._ranges = ranges

    @property
    def outdated(self) -> bool:
        """Whether the masters' last answer has another partitioning."""
        return self._ranges is not None and self._ranges.now is not self.partitioning

    def renew(self, in_flight: Collection[int]) -> frozenset[int] | None:
        """Put the newest partitioning from the masters in force. `in_flight`: tablets with a block under way.

        Returns the tablets that it drops: their waiting rows are assigned to tablets again. None: the present
        partitioning stays in force."""
        if self._ranges is None or not self.outdated:
            return None
        if self._ranges.now is not self._next:
            self._next = self._ranges.now
            self.dropped = dropped_ordinals(self.partitioning, self._next)
        if not self.dropped.isdisjoint(in_flight):
            return None
        dropped, self.dropped, self.partitioning = self.dropped, frozenset(), self._next
        return dropped


def _wanted(schema: Schema, spec: ScanSpec) -> tuple[Schema, Sequence[Predicate], bytes, bytes]:
    return schema, spec.predicates, spec.lower_key, spec.upper_key

"""The offset of a stream: how far it has come. Spark writes it into the checkpoint and hands it back. Pure.

Spark compares offsets as JSON text. Invariant: equal offsets have equal text, so the fields always have the
same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stele.model.errors import Code, Rejected


@dataclass(frozen=True, slots=True)
class Offset:
    """The stream has all changes up to the hybrid time `ts`. If `ts` is 0, it has nothing yet, and first gets
    the whole table.

    Attributes:
        schema: The version of the table's schema by which the batch up to here is read.
        table: The table's id. A table that is created again under the same name has another id.
        tablets: Tablets with this ordinal or a higher one were added later. Those below are in the batch.
        recoveries: How often tablets were recovered from a lost majority, all together.
    """

    ts: int
    schema: int
    table: str
    tablets: int
    recoveries: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The offset as Spark keeps it."""
        return {
            "ts": self.ts,
            "schema": self.schema,
            "table": self.table,
            "tablets": self.tablets,
            "recoveries": self.recoveries,
        }

    @staticmethod
    def of(given: dict[str, Any]) -> Offset:
        """The offset from what Spark kept: the inverse of `to_dict`.

        Raises:
            Rejected: UNSUPPORTED_VERSION, it is not an offset that this release knows.
        """
        try:
            return Offset(**given)
        except TypeError as exc:
            raise Rejected(
                f"the checkpoint has an offset {given!r}, which this release does not know ({exc}); upgrade Stele in the driver, "
                "or start the stream with a new checkpoint",
                code=Code.UNSUPPORTED_VERSION,
            ) from exc

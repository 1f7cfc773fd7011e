"""How far a stream has come: what Spark writes into the checkpoint and hands back. Pure.

Spark compares offsets as JSON text. Invariant: equal offsets have equal text, so the fields come in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stele.model.errors import Code, Rejected


@dataclass(frozen=True, slots=True)
class Offset:
    """A stream has all changes up to the hybrid time `ts`; 0: nothing yet, and the whole table comes first.

    Attributes:
        schema: The version of the table's schema by which the batch up to here is read.
        table: The table's id. A table that is created again under the name is another one.
        tablets: Tablets with this ordinal or a higher one were added later. Those below are in the batch.
        recoveries: How often tablets were recovered from a lost majority, all together.
    """

    ts: int
    schema: int
    table: str
    tablets: int
    recoveries: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As Spark keeps it."""
        return {
            "ts": self.ts,
            "schema": self.schema,
            "table": self.table,
            "tablets": self.tablets,
            "recoveries": self.recoveries,
        }

    @staticmethod
    def of(given: dict[str, Any]) -> Offset:
        """The inverse of `to_dict`.

        Raises:
            Rejected: UNSUPPORTED_VERSION: it is not such an offset.
        """
        try:
            return Offset(**given)
        except TypeError as exc:
            raise Rejected(
                f"the checkpoint has an offset {given!r}, which this release does not know ({exc}); upgrade Stele in the driver, "
                "or start the stream with a new checkpoint",
                code=Code.UNSUPPORTED_VERSION,
            ) from exc

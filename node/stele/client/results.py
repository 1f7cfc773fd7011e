"""What a write of many rows comes back with. Imports only the model.

Invariant: a row is either written or listed with a reason; none is lost between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stele.model.block import RowError
from stele.model.errors import Code, Rejected

_SHOWN = 5


@dataclass(slots=True)
class WriteResult:
    """`rows_written` were acknowledged; `row_errors` say why others were not, by their position in the input.

    `timestamp` is the highest hybrid time of the batches: a scan at or above it sees all of them.
    """

    rows_written: int = 0
    row_errors: list[RowError] = field(default_factory=list)
    timestamp: int = 0

    def raise_for_errors(self) -> WriteResult:
        """Itself, if no row failed.

        Raises:
            RowErrors: if some did. The others are written.
        """
        if self.row_errors:
            raise RowErrors(self)
        return self


class RowErrors(Rejected):
    """Some rows were refused, each for its own reason; `result` has them all. The other rows are written."""

    def __init__(self, result: WriteResult) -> None:
        errors = result.row_errors
        shown = "; ".join(f"row {e.row}: {e.code.name} {e.message}" for e in errors[:_SHOWN])
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        super().__init__(
            f"{len(errors)} rows were refused, {result.rows_written} written: {shown}{more}",
            code=errors[0].code if len({e.code for e in errors}) == 1 else Code.INVALID_ARGUMENT,
        )
        self.result = result

    @property
    def errors(self) -> Sequence[RowError]:
        """Why each refused row was refused."""
        return self.result.row_errors

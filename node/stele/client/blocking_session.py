"""A session of the blocking client. Each method runs the asynchronous method of the same name and waits.

Invariant: the only state here is the client. A call raises what the asynchronous method raises.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from stele.client import reprs
from stele.client.lookup import Row
from stele.client.results import WriteResult
from stele.client.session import AsyncSession
from stele.model.block import RowOp
from stele.model.errors import Closed

if TYPE_CHECKING:
    from stele.client.blocking import Client


class Session:
    """One caller's rows, written in the background in the given order. Leaving the `with` block flushes.

    Example:
        >>> with table.new_session(flush_interval_s=0.5) as session:
        ...     session.insert({"day": date(2024, 5, 5), "name": "roof", "value": 17.0})
    """

    def __init__(self, client: Client, session: AsyncSession) -> None:
        self._client = client
        self._session = session

    def __repr__(self) -> str:
        return reprs.blocking(self._session)

    def insert(self, row: Row) -> None:
        """Queue a whole row whose key must not exist. `flush` raises the error of a wrong row.

        Example:
            >>> with table.new_session() as session:
            ...     session.insert({"day": date(2024, 5, 5), "name": "roof", "value": 17.0})
        """
        self.apply(RowOp.INSERT, row)

    def upsert(self, row: Row) -> None:
        """Queue a whole row that replaces a row with its key. See `insert`.

        Example:
            >>> with table.new_session() as session:
            ...     session.upsert({"day": date(2024, 5, 1), "name": "roof", "value": 17.0})
        """
        self.apply(RowOp.UPSERT, row)

    def update(self, row: Row) -> None:
        """Queue some columns of a row whose key must exist. See `insert`.

        Example:
            >>> with table.new_session() as session:
            ...     session.update({"day": date(2024, 5, 1), "name": "roof", "value": None})
        """
        self.apply(RowOp.UPDATE, row)

    def delete(self, row: Row) -> None:
        """Queue the removal of the row with this key, which must exist. See `insert`.

        Example:
            >>> with table.new_session() as session:
            ...     session.delete({"day": date(2024, 5, 1), "name": "roof"})
        """
        self.apply(RowOp.DELETE, row)

    def apply(self, op: RowOp | str, row: Row) -> None:
        """Queue one row of any operation. Waits while the buffer is full.

        Raises SteleError if an earlier flush failed. Then this row was not queued, and `flush` says which of
        the others were not written.

        Example:
            >>> with table.new_session() as session:
            ...     session.apply("insert_ignore", {"day": date(2024, 5, 1), "name": "roof", "value": 0.0})
            >>> table.get((date(2024, 5, 1), "roof"), ["value"])
            {'value': 21.5}
        """
        self._client.run(self._session.apply(op, row))

    def flush(self) -> WriteResult:
        """Write what is queued. Returns what was written since the last flush.

        Raises RowErrors if rows were refused or not acknowledged since then; the others are written.

        Example:
            >>> with table.new_session() as session:
            ...     session.upsert({"day": date(2024, 5, 6), "name": "roof", "value": 16.0})
            ...     session.flush().rows_written
            1
        """
        return self._client.run(self._session.flush())

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Closed) if kind is not None else contextlib.nullcontext():
            self._client.run(self._session.__aexit__(kind, exc, trace))

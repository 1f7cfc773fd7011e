"""The plain client: the asynchronous one on a thread with an event loop of its own. For scripts, notebooks and Spark.

Invariant: every call waits for its coroutine and raises what it raises; no result is lost when the client is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from stele.client.async_client import TIMEOUT_S, AsyncClient
from stele.client.contact import FIRST_CONTACT_S
from stele.client.kv import KeySpace
from stele.client.locations import TableInfo
from stele.client.results import WriteResult
from stele.client.scan import Scanner
from stele.client.session import Session
from stele.client.table import AsyncTable, PredicateLike
from stele.model.block import RowOp
from stele.model.ids import HybridTime
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0


class Client:
    """`with Client(["10.0.0.1:7051"]) as client:`. May be used from several threads. See AsyncClient for arguments."""

    def __init__(
        self,
        masters: str | Iterable[str],
        *,
        timeout_s: float = TIMEOUT_S,
        first_contact_s: float = FIRST_CONTACT_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stele-client", daemon=True)
        self._thread.start()
        try:
            self.asynchronous = self.run(_make(masters, timeout_s, first_contact_s))
        except BaseException:
            self._end_loop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client on the client's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End all connections and the thread."""
        if not self._loop.is_closed():
            self.run(self.asynchronous.close())
            self._end_loop()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def now(self) -> HybridTime:
        """As AsyncClient.now."""
        return self.asynchronous.now()

    def observe(self, timestamp: int) -> None:
        """As AsyncClient.observe."""
        self.asynchronous.observe(timestamp)

    def create_table(
        self,
        name: str,
        schema: Schema,
        partitioning: PartitionSchema | None = None,
        *,
        replication_factor: int = 3,
        wait: bool = True,
        timeout_s: float = 60.0,
    ) -> Table:
        """As AsyncClient.create_table."""
        coroutine = self.asynchronous.create_table(
            name,
            schema,
            partitioning,
            replication_factor=replication_factor,
            wait=wait,
            timeout_s=timeout_s,
        )
        return Table(self, self.run(coroutine))

    def delete_table(self, name: str) -> None:
        """As AsyncClient.delete_table."""
        self.run(self.asynchronous.delete_table(name))

    def list_tables(self) -> list[TableInfo]:
        """As AsyncClient.list_tables."""
        return self.run(self.asynchronous.list_tables())

    def describe(self, name: str) -> TableInfo:
        """As AsyncClient.describe."""
        return self.run(self.asynchronous.describe(name))

    def open_table(self, name: str) -> Table:
        """As AsyncClient.open_table."""
        return Table(self, self.run(self.asynchronous.open_table(name)))

    def keyspace(self, name: str) -> BlockingKeySpace:
        """As AsyncClient.keyspace."""
        return BlockingKeySpace(self, self.run(self.asynchronous.keyspace(name)))

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._loop.close()


class Table:
    """An open table; every method as in AsyncTable, waiting."""

    def __init__(self, client: Client, table: AsyncTable) -> None:
        self._client = client
        self.asynchronous = table

    @property
    def name(self) -> str:
        """Its name."""
        return self.asynchronous.name

    @property
    def schema(self) -> Schema:
        """Its schema."""
        return self.asynchronous.schema

    @property
    def arrow_schema(self) -> pa.Schema:
        """Arrow schema of all columns."""
        return self.asynchronous.arrow_schema

    def put(self, row: Mapping[str, Any]) -> int:
        """As AsyncTable.put."""
        return self._client.run(self.asynchronous.put(row))

    upsert = put

    def insert(self, row: Mapping[str, Any]) -> int:
        """As AsyncTable.insert."""
        return self._client.run(self.asynchronous.insert(row))

    def update(self, row: Mapping[str, Any]) -> int:
        """As AsyncTable.update."""
        return self._client.run(self.asynchronous.update(row))

    def delete(self, row: Mapping[str, Any]) -> int:
        """As AsyncTable.delete."""
        return self._client.run(self.asynchronous.delete(row))

    def get(self, key: Mapping[str, Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """As AsyncTable.get."""
        return self._client.run(self.asynchronous.get(key, columns))

    def write_arrow(
        self,
        data: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
        op: RowOp | str = RowOp.UPSERT,
        *,
        timeout_s: float | None = None,
        on_rows: Callable[[int], None] | None = None,
        raise_row_errors: bool = True,
    ) -> WriteResult:
        """As AsyncTable.write_arrow. `on_rows` is called on the client's thread."""
        return self._client.run(
            self.asynchronous.write_arrow(
                data, op, timeout_s=timeout_s, on_rows=on_rows, raise_row_errors=raise_row_errors
            )
        )

    def scan(
        self,
        columns: Sequence[str] | None = None,
        predicates: Sequence[PredicateLike] = (),
        *,
        lower: Sequence[Any] | Mapping[str, Any] | None = None,
        upper: Sequence[Any] | Mapping[str, Any] | None = None,
        limit: int | None = None,
        ordered: bool = False,
        snapshot: int | None = None,
    ) -> BlockingScanner:
        """As AsyncTable.scan."""
        scanner = self.asynchronous.scan(
            columns, predicates, lower=lower, upper=upper, limit=limit, ordered=ordered, snapshot=snapshot
        )
        return BlockingScanner(self._client, scanner)

    def new_session(self, *, flush_interval_s: float = 1.0, buffer_bytes: int = 8 << 20) -> BlockingSession:
        """As AsyncTable.new_session."""

        async def make() -> Session:
            return self.asynchronous.new_session(flush_interval_s=flush_interval_s, buffer_bytes=buffer_bytes)

        return BlockingSession(self._client, self._client.run(make()))


class BlockingScanner:
    """A scan; every method as in Scanner, waiting."""

    def __init__(self, client: Client, scanner: Scanner) -> None:
        self._client = client
        self.asynchronous = scanner

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As Scanner.batches."""
        source = self.asynchronous.batches()
        try:
            while True:
                try:
                    yield self._client.run(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            self._client.run(_close(source))

    def to_table(self) -> pa.Table:
        """As Scanner.to_table."""
        return self._client.run(self.asynchronous.to_table())

    def to_pandas(self) -> Any:
        """As Scanner.to_pandas."""
        return self.to_table().to_pandas()

    def count(self) -> int:
        """As Scanner.count."""
        return self._client.run(self.asynchronous.count())


class BlockingSession:
    """A session; every method as in Session, waiting. Leaving it flushes."""

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session

    def insert(self, row: Mapping[str, Any]) -> None:
        """As Session.insert."""
        self.apply(RowOp.INSERT, row)

    def upsert(self, row: Mapping[str, Any]) -> None:
        """As Session.upsert."""
        self.apply(RowOp.UPSERT, row)

    def update(self, row: Mapping[str, Any]) -> None:
        """As Session.update."""
        self.apply(RowOp.UPDATE, row)

    def delete(self, row: Mapping[str, Any]) -> None:
        """As Session.delete."""
        self.apply(RowOp.DELETE, row)

    def apply(self, op: RowOp, row: Mapping[str, Any]) -> None:
        """As Session.apply."""
        self._client.run(self._session.apply(op, row))

    def flush(self) -> WriteResult:
        """As Session.flush."""
        return self._client.run(self._session.flush())

    def __enter__(self) -> BlockingSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.run(self._session.__aexit__(kind, exc, trace))


class BlockingKeySpace:
    """A key space; every method as in KeySpace, waiting."""

    def __init__(self, client: Client, keyspace: KeySpace) -> None:
        self._client = client
        self._keyspace = keyspace

    def replace(self, key: bytes | str, value: bytes | str) -> None:
        """As KeySpace.replace."""
        self._client.run(self._keyspace.replace(key, value))

    def insert(self, key: bytes | str, value: bytes | str) -> None:
        """As KeySpace.insert."""
        self._client.run(self._keyspace.insert(key, value))

    def read(self, key: bytes | str) -> bytes | None:
        """As KeySpace.read."""
        return self._client.run(self._keyspace.read(key))

    def delete(self, key: bytes | str) -> None:
        """As KeySpace.delete."""
        self._client.run(self._keyspace.delete(key))

    def list(self, prefix: bytes | str = b"") -> list[tuple[bytes, bytes]]:
        """As KeySpace.list."""
        return self._client.run(self._keyspace.list(prefix))


async def _make(masters: str | Iterable[str], timeout_s: float, first_contact_s: float) -> AsyncClient:
    return AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s)


async def _next(source: Any) -> pa.RecordBatch:
    return await anext(source)


async def _close(source: Any) -> None:
    await source.aclose()

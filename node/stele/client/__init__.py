"""The Python client of Stele: asynchronous and blocking. Imports stele.model and stele.rpc, and nothing of
the servers.

The names here are for programs and for other packages of this repository; `stele` has them too. Invariant: a
write that was acknowledged is in the table once. A write that was not is reported as not done, or as of
unknown outcome.
"""

from stele.client.async_client import AsyncClient
from stele.client.blocking import Client
from stele.client.blocking_kv import KeySpace, Lease, Watch
from stele.client.blocking_scan import Scanner
from stele.client.blocking_session import Session
from stele.client.blocking_table import Table
from stele.client.connect import connect, connect_async
from stele.client.dropping import DroppedTable
from stele.client.durability import Durability, Written
from stele.client.holds import TableHold
from stele.client.jobs import Job, JobPart
from stele.client.kv import AsyncKeySpace, KeySnapshot, KeyValue
from stele.client.lease import AsyncLease, KeyLease
from stele.client.locations import TableInfo
from stele.client.results import RowErrors, WriteResult
from stele.client.scan import AsyncScanner
from stele.client.session import AsyncSession
from stele.client.table import AsyncTable
from stele.client.watch import AsyncWatch, KeyChange, KeyWrite
from stele.model.errors import Closed

__all__ = [
    "AsyncClient",
    "AsyncKeySpace",
    "AsyncLease",
    "AsyncScanner",
    "AsyncSession",
    "AsyncTable",
    "AsyncWatch",
    "Client",
    "Closed",
    "DroppedTable",
    "Durability",
    "Job",
    "JobPart",
    "KeyChange",
    "KeyLease",
    "KeySnapshot",
    "KeySpace",
    "KeyValue",
    "KeyWrite",
    "Lease",
    "RowErrors",
    "Scanner",
    "Session",
    "Table",
    "TableHold",
    "TableInfo",
    "Watch",
    "WriteResult",
    "Written",
    "connect",
    "connect_async",
]

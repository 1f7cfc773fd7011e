"""The Python client of Stele: asynchronous and blocking. Imports stele.model and stele.rpc, and nothing of the servers.

`AsyncClient` and `Client` are where to begin. Invariant: a write that was acknowledged is in the table once, and one
that was not is reported as not done, or as of unknown outcome, never as something else.
"""

from stele.client.async_client import AsyncClient
from stele.client.blocking import Client
from stele.client.blocking_table import Table
from stele.client.kv import AsyncKeySpace
from stele.client.locations import TableInfo
from stele.client.results import RowErrors, WriteResult
from stele.client.scan import AsyncScanner
from stele.client.session import AsyncSession
from stele.client.table import AsyncTable
from stele.model.errors import Closed

__all__ = [
    "AsyncClient",
    "AsyncTable",
    "Client",
    "Closed",
    "AsyncKeySpace",
    "RowErrors",
    "AsyncScanner",
    "AsyncSession",
    "Table",
    "TableInfo",
    "WriteResult",
]

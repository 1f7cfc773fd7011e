"""Stele: a replicated table store. Programs use only the names in this module; the packages below are internal.

    import stele

    with stele.connect("HOST:PORT,HOST:PORT") as client:
        columns = [stele.column("day", "date"), stele.column("value", "double", nullable=True)]
        schema = stele.Schema.make(columns, key=["day"])
        table = client.create_table("readings", schema, stele.hash("day", buckets=4))

Importing it is cheap: each name is loaded when it is first used, so a server or a command loads only what it needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stele.client.async_client import AsyncClient
    from stele.client.blocking import Client
    from stele.client.blocking_kv import KeySpace, Lease, Watch
    from stele.client.blocking_scan import Scanner
    from stele.client.blocking_session import Session
    from stele.client.blocking_table import Table
    from stele.client.columns import column
    from stele.client.connect import connect, connect_async
    from stele.client.dropping import DroppedTable
    from stele.client.durability import Durability, Written
    from stele.client.holds import TableHold
    from stele.client.jobs import Job, JobPart
    from stele.client.kv import AsyncKeySpace, KeySnapshot, KeyValue
    from stele.client.lease import AsyncLease, KeyLease
    from stele.client.locations import TableInfo
    from stele.client.nearby import AgedRow
    from stele.client.partitioning import hash, range
    from stele.client.results import RowErrors, WriteResult
    from stele.client.scan import AsyncScanner
    from stele.client.session import AsyncSession
    from stele.client.table import AsyncTable
    from stele.client.watch import AsyncWatch, KeyChange, KeyWrite
    from stele.model.block import RowError
    from stele.model.column import Column
    from stele.model.errors import Closed, Code, Corrupt, InvariantViolation, Rejected, Retryable, SteleError
    from stele.model.partitioning import HashPartitioning, RangePartitioning
    from stele.model.schema import Schema

__version__ = "0.2.0.dev0"
"""The version of everything in this repository. pyproject.toml takes it from here."""

_MODULES = {
    "stele.client.async_client": ("AsyncClient",),
    "stele.client.blocking": ("Client",),
    "stele.client.blocking_kv": ("KeySpace", "Lease", "Watch"),
    "stele.client.blocking_scan": ("Scanner",),
    "stele.client.blocking_session": ("Session",),
    "stele.client.blocking_table": ("Table",),
    "stele.client.columns": ("column",),
    "stele.client.connect": ("connect", "connect_async"),
    "stele.client.durability": ("Durability", "Written"),
    "stele.client.holds": ("TableHold",),
    "stele.client.kv": ("AsyncKeySpace", "KeySnapshot", "KeyValue"),
    "stele.client.lease": ("AsyncLease", "KeyLease"),
    "stele.client.dropping": ("DroppedTable",),
    "stele.client.jobs": ("Job", "JobPart"),
    "stele.client.locations": ("TableInfo",),
    "stele.client.nearby": ("AgedRow",),
    "stele.client.partitioning": ("hash", "range"),
    "stele.client.results": ("RowErrors", "WriteResult"),
    "stele.client.scan": ("AsyncScanner",),
    "stele.client.session": ("AsyncSession",),
    "stele.client.table": ("AsyncTable",),
    "stele.client.watch": ("AsyncWatch", "KeyChange", "KeyWrite"),
    "stele.model.block": ("RowError",),
    "stele.model.column": ("Column",),
    "stele.model.errors": (
        "Closed",
        "Code",
        "Corrupt",
        "InvariantViolation",
        "Rejected",
        "Retryable",
        "SteleError",
    ),
    "stele.model.partitioning": ("HashPartitioning", "RangePartitioning"),
    "stele.model.schema": ("Schema",),
}
"""Where each public name is defined. The imports above say the same to type checkers; a test compares them."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AgedRow",
    "AsyncClient",
    "AsyncKeySpace",
    "AsyncLease",
    "AsyncScanner",
    "AsyncSession",
    "AsyncTable",
    "AsyncWatch",
    "Client",
    "Closed",
    "Code",
    "Column",
    "Corrupt",
    "DroppedTable",
    "Durability",
    "HashPartitioning",
    "InvariantViolation",
    "Job",
    "JobPart",
    "KeyChange",
    "KeyLease",
    "KeySnapshot",
    "KeySpace",
    "KeyValue",
    "KeyWrite",
    "Lease",
    "RangePartitioning",
    "Rejected",
    "Retryable",
    "RowError",
    "RowErrors",
    "Scanner",
    "Schema",
    "Session",
    "SteleError",
    "Table",
    "TableHold",
    "TableInfo",
    "Watch",
    "WriteResult",
    "Written",
    "__version__",
    "column",
    "connect",
    "connect_async",
    "hash",
    "range",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'stele' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Measures how much the tables take: bytes of a view, replicas on nodes. tables.py, altering.py and
replicas.py use it before a change.

Pure. Invariant: a measured size is at least what a view of healthy tables takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from stele.master.catalog import Catalog
from stele.master.records import TableRecord

VIEW_BYTES_MAX = 24 << 20
"""The most bytes of a view for tables, counted by `view_bytes`: some 14,000 tablets of three replicas.

Views are sent in pages, so the size of a message does not bound them. But masters and drivers hold them in
memory, and a new driver reads a whole view. docs/performance.md has measurements with 10,000 tablets.
"""
ONE_MESSAGE_BYTES_MAX = 12 << 20
"""The most bytes of a view for tables before cluster version 2 is finalized.

Programs of version 1 read a view as one message of 16 MiB. The rest of the message is for nodes, and for details of
tablets that change or failed.
"""


def view_bytes(table: TableRecord, tablets: int) -> int:
    """The most bytes that a healthy table with this many tablets takes in a view.

    Each tablet has one configuration from the catalog, and one from each replica. Each configuration holds
    the addresses of all members, of up to 48 characters.
    """
    name, peers = len(table.name.encode()), table.replication_factor
    config = 24 + 80 * peers
    replica = 170 + config
    compared = 80  # the newest comparison of a replica; others are of replicas that differ or wait
    tablet = 100 + compared + name + config + peers * (replica + 30)
    schemas = len(table.schema) + len(table.fully_applied_schema)
    notes = len(table.owner.encode()) + len(table.comment.encode())
    return 150 + name + schemas + notes + len(table.partitioning) + tablets * tablet


def all_view_bytes(catalog: Catalog, changed: TableRecord | None = None) -> int:
    """The most bytes that all healthy tables take in a view. `changed`: a table as it is about to be."""
    return sum(view_bytes(table, tablets) for table, tablets in _counted(catalog, changed))


def wanted_replicas(catalog: Catalog, changed: TableRecord | None = None) -> int:
    """The replicas that all tables want, placed or not. `changed`: a table as it is about to be."""
    return sum(table.replication_factor * tablets for table, tablets in _counted(catalog, changed))


def _counted(catalog: Catalog, changed: TableRecord | None) -> Iterator[tuple[TableRecord, int]]:
    """Each table that holds tablets, with the number of its tablets."""
    for table in (*catalog.live_tables, *catalog.dropped.values()):
        shown = changed if changed is not None and changed.table_id == table.table_id else table
        yield shown, sum(i in catalog.current for i in catalog.tablets_of[table.table_id])

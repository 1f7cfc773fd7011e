"""Chooses the number of tablets of a table that is created without partitions. Pure; used by tables.py.

Nobody knows how large such a table becomes, and an unneeded tablet adds work to every round of the driver. So
the number is small and grows with the cluster. With three replicas per tablet, each node gets about one of
the table's replicas. The number of cores does not matter, since a node serves all its tablets on one event
loop.

Invariant: on a cluster of up to five nodes the table gets one tablet, which holds all rows in key order.
"""

from __future__ import annotations

from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema

NODES_PER_TABLET = 3
TABLETS_MAX = 16
"""The most tablets that are chosen. Users who expect a larger table name its partitions."""


def chosen_tablets(nodes: int) -> int:
    """The number of tablets of a new table on a cluster of `nodes` nodes."""
    return max(1, min(nodes // NODES_PER_TABLET, TABLETS_MAX))


def chosen_partitioning(schema: Schema, nodes: int) -> PartitionSchema:
    """Partition by the hash of the whole key. There is one tablet if there are few nodes, or if the key
    cannot be hashed.
    """
    count = chosen_tablets(nodes)
    if count == 1:
        return PartitionSchema()
    key = tuple(int(column_id) for column_id in schema.key_column_ids)
    hashed = PartitionSchema((HashPartition(key, count, 0),), None)
    return PartitionSchema() if hashed.faults(schema) else hashed


def why_so_many(tablets: int, nodes: int) -> str:
    """The chosen number and the reason for it, as text for people."""
    rule = f"no partitions were named, and the cluster has {nodes} node{'s' if nodes != 1 else ''}"
    if tablets == 1:
        return f"one tablet: {rule}; name a hash with more buckets for a large table"
    return f"{tablets} tablets by the hash of the key: {rule}, one tablet for {NODES_PER_TABLET} of them"

"""A table whose maker names no partitions gets few tablets, by the number of nodes, and is told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.master.choosing import chosen_partitioning, chosen_tablets, why_so_many
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import create_request, hex_of, ready, world

TWO = Schema.make([("a", "int64"), ("b", "string"), ("c", "double", True)], ["a", "b"])


@pytest.mark.parametrize(
    ("nodes", "tablets"), [(0, 1), (1, 1), (3, 1), (5, 1), (6, 2), (11, 3), (48, 16), (500, 16)]
)
def test_one_tablet_for_three_nodes(nodes: int, tablets: int) -> None:
    assert chosen_tablets(nodes) == tablets
    made = chosen_partitioning(TWO, nodes)
    assert made.tablets == tablets and not made.faults(TWO)
    assert made == (
        PartitionSchema() if tablets == 1 else PartitionSchema((HashPartition((0, 1), tablets, 0),))
    )


def test_the_reason_names_the_rule() -> None:
    assert why_so_many(1, 1).startswith("one tablet: no partitions were named, and the cluster has 1 node;")
    assert why_so_many(2, 6) == (
        "2 tablets by the hash of the key: no partitions were named, and the cluster has 6 nodes, "
        "one tablet for 3 of them"
    )


async def test_the_masters_choose_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 6)
        request = create_request("t", table_id="d" * 32)
        request.choose_tablets = True
        first = await w.leader.CreateTable(request, None)
        assert (first.tablets, first.why) == (2, why_so_many(2, 6))
        assert len(w.catalog.tablets_of_table("d" * 32)) == 2
        w.add_nodes(3)
        await w.beat_until(lambda: sum(n.role == "node" and n.formed for n in w.catalog.nodes.values()) == 9)
        again = await w.leader.CreateTable(request, None)
        assert hex_of(again.table_id) == "d" * 32 and again.tablets == 2, "a repeated request does nothing"

        plain = await w.leader.CreateTable(create_request("one"), None)
        assert not plain.tablets and len(w.catalog.tablets_of_table(hex_of(plain.table_id))) == 1
        named = create_request("four", buckets=4)
        named.choose_tablets = True
        four = await w.leader.CreateTable(named, None)
        assert len(w.catalog.tablets_of_table(hex_of(four.table_id))) == 4, "what is named counts"
        space = pb.CreateTableRequest(name="k", kind="keyspace", choose_tablets=True)
        assert not (await w.leader.CreateTable(space, None)).why

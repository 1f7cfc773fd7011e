"""A node told to stop: its own handler is called, whatever the libraries in its process do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from stele.client import AsyncClient
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.ticket import ScanCommand
from tests.harness import Cluster

SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])
ROWS = 100_000


async def test_a_node_that_a_stuck_reader_reads_from_stops(tmp_path: Path) -> None:
    """pyarrow's `serve` handled the signal first, and let the node know of it once the last reader had gone."""
    async with (
        Cluster(tmp_path, masters=1, nodes=1) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        (node,) = cluster.nodes
        table = await client.create_table("t", SCHEMA, PartitionSchema(), replication_factor=1)
        text = pa.array(["x" * 250] * ROWS)  # more than what sockets and windows hold
        await table.write_arrow(pa.table({"id": np.arange(ROWS), "text": text}))
        command = ScanCommand(tablet_id=table.tablet(0).place.tablet_id)
        with fl.connect(f"grpc+tcp://{node.flight_address}") as stuck:
            info = stuck.get_flight_info(fl.FlightDescriptor.for_command(command.encode()))
            reader = stuck.do_get(info.endpoints[0].ticket)
            reader.read_chunk()
            assert await cluster.stop(node) == 0
            assert cluster.log_lines(node)[-1]["event"] == "stopped"
            reader.cancel()

"""A cluster where there is no IPv4: masters and nodes listen at, tell and dial `[::1]:port`, for every kind of call."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.resolve import join_address
from tests.harness.processes import Cluster, Member

HOST = "::1"


def free_ports(count: int) -> list[int]:
    """Ports of ::1 that nobody uses now."""
    taken = [socket.create_server((HOST, 0), family=socket.AF_INET6) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in taken]
    finally:
        for one in taken:
            one.close()


def has_ipv6() -> bool:
    """Whether this machine has an address of IPv6 to try it on."""
    try:
        return bool(free_ports(1))
    except OSError:
        return False


@dataclass
class OnePort(Member):
    """A member that shares its address with all others, and so has ports of its own."""

    port: int = 0

    @property
    def address(self) -> str:
        """As a pod's arguments give it."""
        return join_address(self.host, self.port)


class OnLoopback(Cluster):
    """All on ::1: Linux has no other loopback address of IPv6."""

    def _member(self, role: str, number: int) -> Member:
        name, (port, flight, http) = f"{role}-{number}", free_ports(3)
        return OnePort(
            name,
            role,
            HOST,
            self.directory / name,
            machine=name,
            flight_port=flight,
            http_port=http,
            port=port,
        )


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_rows_are_written_copied_and_read(tmp_path: Path) -> None:
    schema = Schema.make([("id", "int64"), ("text", "string", True)], ["id"])
    batch = pa.table({"id": pa.array(range(500), pa.int64()), "text": [f"row {i}" for i in range(500)]})
    async with OnLoopback(tmp_path, masters=1, nodes=3, arguments=("--stream-port", "0")) as cluster:
        async with AsyncClient(cluster.master_addresses) as client:
            table = await client.create_table("t", schema, PartitionSchema((HashPartition((0,), 2),)))
            await table.write_arrow(batch)
            assert await table.scan(columns=["id"]).count() == 500
            assert (await table.get({"id": 7}))["text"] == "row 7"
        for node in cluster.nodes:
            assert (await cluster.identity(node))["address"] == node.address

"""Tickets, commands and scans with hostile numbers, over Arrow Flight: refused or served, never INTERNAL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.client import AsyncClient
from stele.model.errors import Code
from stele.model.ids import new_id
from stele.model.partition import PartitionSchema
from stele.model.predicate import Predicate, ScanSpec
from stele.rpc.flight import from_flight_error
from stele.rpc.ticket import TICKET_VERSION, CopyTicket, Ticket
from tests.tserver.local import SCHEMA, LocalCluster, count, fill

NODES = 1
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 5, 1 << 31, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64, 10**400, -(10**400), 1e300),
    *("", "x", "9" * 5_000, "zz", True, None, [], {}, [[]], [None], ["x"] * 3, {"a": 1}, "\x1b[2J"),
    *(
        "ff" * 100_000,
        [1 << 70],
        [-1],
        [[1, "=", "x"]],
        [[0, "~", ""]],
        [[1 << 70, "=", ""]],
        [[0, "in", "AA=="]],
    ),
)
RAW = (
    *(b"", b"{}", b"null", b"[" * 100_000, b'{"scan":' * 50_000, b'{"snapshot":1e999}', b'{"snapshot":NaN}'),
    *(b'{"snapshot":' + b"9" * 5_000 + b"}", b"\xff\xfe", b'"' + b"x" * 1_000_000),
)


def changed(fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """The message with one field hostile at a time, at any depth, or missing."""
    for at, (name, present) in enumerate(fields.items()):
        for value in VALUES:
            yield f"{name} {str(value)[:40]}", _encoded({**fields, name: value})
        yield f"no {name}", _encoded({k: v for i, (k, v) in enumerate(fields.items()) if i != at})
        if isinstance(present, dict):
            for what, raw in changed(present):
                yield f"{name}.{what}", _encoded({**fields, name: json.loads(raw[1:])})


def _encoded(fields: dict[str, Any]) -> bytes:
    return bytes([TICKET_VERSION]) + json.dumps(fields).encode()


def codes(address: str, tickets: list[tuple[str, bytes]], commands: list[tuple[str, bytes]]) -> list[str]:
    """What was INTERNAL. Blocks; one connection, as a client has it."""
    wrong = []
    options = fl.FlightCallOptions(timeout=10.0)
    with fl.connect(f"grpc://{address}") as client:

        def attempt(what: str, call: Any) -> None:
            try:
                call()
            except (fl.FlightError, pa.ArrowException) as exc:
                if not isinstance(exc, fl.FlightError):
                    wrong.append(f"{what}: {exc!r}")
                    return
                error = from_flight_error(exc, where="test")
                if isinstance(exc, fl.FlightInternalError) or error.code in (Code.INTERNAL, Code.TIMED_OUT):
                    wrong.append(f"{what}: {error}")

        for what, raw in tickets:
            attempt(f"ticket {what}", lambda raw=raw: client.do_get(fl.Ticket(raw), options).read_all())
        for what, raw in commands:
            descriptor = fl.FlightDescriptor.for_command(raw)
            attempt(f"command {what}", lambda d=descriptor: client.get_flight_info(d, options))
    return wrong


async def goes_on(client: AsyncClient) -> None:
    assert await count(client) == 100


async def test_no_ticket_with_a_hostile_field_is_internal(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema(), replication_factor=1)
        await fill(client, 100)
        tablet = table.tablet(0).place.tablet_id
        spec = ScanSpec((0, 1), (Predicate(0, "<", 50),), b"", b"", 10, True, b"", 7)
        scan = Ticket(
            cluster.cluster_id, tablet, 0, SCHEMA.version, spec.to_json(SCHEMA), 1_000, cluster.fork_id
        )
        me = node.node_id
        copy = CopyTicket(cluster.cluster_id, "s", "f", 0, 5, me, 1 << 40, me, 1, cluster.fork_id)
        tickets = [*changed(json.loads(scan.encode()[1:])), *changed(json.loads(copy.encode()[1:]))]
        command = {"table": "", "tablet": tablet, "columns": ["id"], "snapshot": 0}
        commands = [*changed(command), *changed({**command, "table": "t", "tablet": new_id()})]
        for raw in RAW:
            tickets.append((str(raw[:30]), bytes([TICKET_VERSION]) + raw))
            commands.append((str(raw[:30]), bytes([TICKET_VERSION]) + raw))
        wrong = await asyncio.to_thread(codes, node.description.flight_address, tickets, commands)
        assert wrong == [], f"{len(wrong)}:\n" + "\n".join(wrong[:30])
        assert not node.failed.done() and node.replicas.get(tablet).running
        await goes_on(client)
    assert "failed because of a bug" not in capsys.readouterr().out

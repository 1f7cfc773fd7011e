"""What GetFlightInfo asks for and answers: descriptors as commands, plans as FlightInfo. Serves nothing.

Used by both ports that answer it: the Flight server (flight.py) and the gRPC server (flight_service.py). Invariant: both
give the same answer to the same descriptor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from stele.model.errors import Rejected
from stele.rpc.flight_sql import ANY_TAG, command_of_sql
from stele.rpc.ticket import ScanCommand, Ticket


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a ticket can be used: HOST:PORT of each replica's Flight server, the best first."""

    ticket: Ticket
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned scan: the schema of its rows, and one endpoint per tablet. `rows`, `bytes`: estimates for all rows of the
    table, -1 if not known. `about`: what else a reader may need, as JSON values."""

    schema: pa.Schema
    endpoints: list[Endpoint]
    rows: int = -1
    bytes: int = -1
    about: Mapping[str, Any] = field(default_factory=dict)


def command_of(descriptor: fl.FlightDescriptor) -> ScanCommand:
    """The command of a descriptor. A path of one part names a table, and asks for all of it. A command is one
    of ours, or a query of Flight SQL.

    Raises:
        Rejected: the path is not of one part; otherwise what `ScanCommand.decode` and `command_of_sql` raise.
    """
    if descriptor.descriptor_type != fl.DescriptorType.PATH:
        raw = bytes(descriptor.command or b"")
        return command_of_sql(raw) if raw.startswith(ANY_TAG) else ScanCommand.decode(raw)
    parts = [bytes(part) for part in descriptor.path]
    if len(parts) != 1 or not parts[0]:
        raise Rejected(f"the path has {len(parts)} parts; expected one, the name of a table")
    return ScanCommand(table=parts[0].decode("utf-8", "replace"))


def info_of(planned: Planned, descriptor: fl.FlightDescriptor) -> fl.FlightInfo:
    """A plan as a FlightInfo. Its `app_metadata` is `Planned.about` as JSON."""
    return fl.FlightInfo(
        planned.schema,
        descriptor,
        [
            fl.FlightEndpoint(
                endpoint.ticket.encode(), [f"grpc+tcp://{address}" for address in endpoint.addresses]
            )
            for endpoint in planned.endpoints
        ],
        planned.rows,
        planned.bytes,
        app_metadata=json.dumps(planned.about, separators=(",", ":")).encode() if planned.about else b"",
    )

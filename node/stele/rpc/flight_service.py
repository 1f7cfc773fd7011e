"""Flight's GetFlightInfo and DoAction on the gRPC port, so that a Flight client needs no address but the masters'.

The rows themselves are read at the addresses of the FlightInfo (flight.py). Flight's DoAction is a stream of
results. Each action here has exactly one, so a unary answer looks the same on the wire. Callers may be any
Flight client, and send no metadata of ours. So they are not checked as other callers are; their tickets name
the cluster.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import pyarrow as pa
import pyarrow.flight as fl

from stele.model.errors import Rejected
from stele.rpc.flight_plan import Planned, command_of, info_of
from stele.rpc.ticket import ScanCommand

SERVICE = "arrow.flight.protocol.FlightService"
METHODS = f"/{SERVICE}/"


class FlightProvider(Protocol):
    """Answers these requests, on the event loop. Raises SteleError."""

    async def plan(self, command: ScanCommand) -> Planned:
        """Plan a scan of a table, or of one tablet."""
        ...

    async def act(self, name: str, body: bytes) -> bytes:
        """Do an action, and return its result. Body and result are JSON."""
        ...


def add_flight_service(server: grpc.aio.Server, provider: FlightProvider) -> None:
    """Have `server` answer GetFlightInfo and DoAction."""

    async def get_flight_info(descriptor: fl.FlightDescriptor, context: Any) -> fl.FlightInfo:
        return info_of(await provider.plan(command_of(descriptor)), descriptor)

    async def do_action(action: fl.Action, context: Any) -> fl.Result:
        return fl.Result(pa.py_buffer(await provider.act(str(action.type), action.body.to_pybytes())))

    handlers = {
        "GetFlightInfo": _handler(get_flight_info, fl.FlightDescriptor),
        "DoAction": _handler(do_action, fl.Action),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _handler(answer: Any, kind: Any) -> grpc.RpcMethodHandler[Any, Any]:
    def read(raw: bytes) -> Any:
        try:
            return kind.deserialize(raw)
        except (pa.ArrowException, ValueError, TypeError) as exc:
            raise Rejected(f"the {len(raw)} bytes are not a {kind.__name__} of Arrow Flight") from exc

    def write(made: Any) -> bytes:
        return bytes(made.serialize())

    return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=read, response_serializer=write)

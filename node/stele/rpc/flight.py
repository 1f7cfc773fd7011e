"""Arrow Flight in front of a node's tablets, in threads of its own; and how a Flight error becomes a `SteleError`.

The node gives a ScanProvider, which is called on Flight's threads and may block. Invariant: no work of a scan is done
on the event loop, and at most `scans_max` run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as fl
import structlog

from stele.model.errors import Code, Rejected, Retryable, SteleError, error_for
from stele.rpc.errors import as_stele_error, error_from_json, error_to_json
from stele.rpc.logging import OncePer
from stele.rpc.resolve import join_address
from stele.rpc.ticket import ScanCommand, Ticket

log = structlog.get_logger("stele.rpc.flight")

SCANS_MAX = 32


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a ticket can be redeemed: HOST:PORT of each replica's Flight server, the best first."""

    ticket: Ticket
    addresses: tuple[str, ...]


class ScanProvider(Protocol):
    """What a node serves. Both are called on threads of Flight, may block, and raise SteleError."""

    def plan(self, command: ScanCommand) -> tuple[pa.Schema, list[Endpoint]]:
        """Schema of the rows and one endpoint per tablet that a command asks for."""
        ...

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        """Waits until the ticket's snapshot can be served, then gives its rows. Closed early if the client leaves.

        Checks tablet, schema version and snapshot; the cluster was checked already.
        """
        ...


class FlightServer:
    """A Flight server with a thread of its own. `host` and `port` as for --listen; port 0 picks one."""

    def __init__(
        self, host: str, port: int, cluster_id: str, provider: ScanProvider, scans_max: int = SCANS_MAX
    ) -> None:
        location = f"grpc+tcp://{join_address(host, port)}"
        try:
            self._server = _Server(location, cluster_id, provider, scans_max)
        except (pa.ArrowException, fl.FlightError, OSError) as exc:
            raise Rejected(
                f"cannot listen for Flight at {host}:{port}: the port is in use, or the address is not this "
                "machine's; stop what uses it or choose another with --flight-port"
            ) from exc
        self.port: int = self._server.port
        self._thread = threading.Thread(target=self._server.serve, name="flight", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse new scans, end those under way. Blocks until they have ended; call it in a thread."""
        self._server.stopping.set()
        self._server.shutdown()
        self._thread.join()


class _Server(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, location: str, cluster_id: str, provider: ScanProvider, scans_max: int) -> None:
        self.stopping = threading.Event()
        self._cluster_id = cluster_id
        self._provider = provider
        self._places = threading.BoundedSemaphore(scans_max)
        self._may_log = OncePer()
        super().__init__(location)

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        try:
            command = ScanCommand.decode(bytes(descriptor.command or b""))
            schema, endpoints = self._provider.plan(command)
        except Exception as exc:  # noqa: BLE001 - the border: what is not ours is logged and told as INTERNAL
            raise self._refused(context, exc, "GetFlightInfo") from None
        return fl.FlightInfo(
            schema,
            descriptor,
            [
                fl.FlightEndpoint(
                    endpoint.ticket.encode(), [f"grpc+tcp://{address}" for address in endpoint.addresses]
                )
                for endpoint in endpoints
            ],
            -1,
            -1,
        )

    def do_get(self, context: Any, raw: Any) -> Any:
        if not self._places.acquire(blocking=False):
            error = Retryable("too many scans run on this node; try another replica", code=Code.THROTTLED)
            raise to_flight_error(error)
        try:
            ticket = Ticket.decode(bytes(raw.ticket))
            if ticket.cluster_id != self._cluster_id:
                raise Rejected(
                    f"this is cluster {self._cluster_id}, the ticket is for {ticket.cluster_id or 'none'}",
                    code=Code.WRONG_CLUSTER,
                )
            schema, batches = self._provider.scan(ticket)
        except Exception as exc:  # noqa: BLE001 - the border, as above
            self._places.release()
            raise self._refused(context, exc, "DoGet") from None
        return fl.GeneratorStream(schema, _Rows(self, context, batches))

    def _not_served(self, context: Any, *arguments: Any) -> Any:
        error = Rejected("only GetFlightInfo and DoGet are served here", code=Code.UNSUPPORTED_VERSION)
        raise self._refused(context, error, "Flight")

    get_schema = list_flights = list_actions = do_action = do_put = do_exchange = _not_served

    def _refused(self, context: Any, exc: BaseException, where: str) -> Exception:
        error = as_stele_error(exc, where=where)
        source = str(context.peer()).rpartition(":")[0]
        if isinstance(error, Rejected) and self._may_log(source, error.code):
            log.warning("scan refused", source=source, error=str(error))
        return to_flight_error(error)


class _Rows(Iterator[pa.RecordBatch]):
    """The batches of one scan; gives its place back when they end or the client has left."""

    def __init__(self, server: _Server, context: Any, batches: Iterable[pa.RecordBatch]) -> None:
        self._server = server
        self._context = context
        self._batches = iter(batches)
        self._open = True

    def __next__(self) -> pa.RecordBatch:
        if not self._open:
            raise StopIteration
        try:
            if self._server.stopping.is_set():
                raise Retryable("the node is stopping; go on at another replica", code=Code.UNAVAILABLE)
            if self._context.is_cancelled():
                raise Retryable("the client has left", code=Code.UNAVAILABLE)
            return next(self._batches)
        except StopIteration:
            self.close()
            raise
        except Exception as exc:  # noqa: BLE001 - the border, as above
            self.close()
            raise to_flight_error(as_stele_error(exc, where="DoGet")) from None

    def close(self) -> None:
        """End the scan; a second call does nothing."""
        if self._open:
            self._open = False
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()
            self._server._places.release()

    def __del__(self) -> None:
        self.close()


def to_flight_error(exc: SteleError) -> Exception:
    """The Flight status of an error; its code travels in the extra info."""
    kind = fl.FlightUnavailableError if isinstance(exc, Retryable) else fl.FlightServerError
    error: Exception = kind(str(exc.args[0]), extra_info=error_to_json(exc))
    return error


def from_flight_error(exc: BaseException, *, where: str) -> SteleError:
    """What a failed Flight call means. `where` is the address asked."""
    if isinstance(exc, SteleError):
        return exc
    info = getattr(exc, "extra_info", None)
    ours = error_from_json(bytes(info)) if info else None
    if ours is not None:
        return ours
    message = f"{where}: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}"
    if isinstance(exc, fl.FlightTimedOutError):
        return error_for(Code.TIMED_OUT, message)
    if isinstance(exc, (fl.FlightUnavailableError, fl.FlightCancelledError, fl.FlightInternalError, OSError)):
        return error_for(Code.UNAVAILABLE, message)
    return error_for(Code.INTERNAL, message)

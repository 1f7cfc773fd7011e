"""Arrow Flight in front of a node's tablets, in threads of its own; and Flight errors as `SteleError`.

The node passes a ScanProvider and a CopyProvider. They are called in Flight's threads and may block.
Invariant: no row and no file byte passes the event loop. At most `scans_max` scans and `copies_max` copy
chunks run at once, shared fairly among callers (`Places`). A reader that takes nothing for STALLED_S, or for
YIELD_S while others wait, loses its place.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.flight as fl
import structlog

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError, error_for
from stele.model.ids import ClusterId
from stele.rpc import forks
from stele.rpc.copy_frames import FRAMES
from stele.rpc.errors import as_stele_error, error_from_json, error_to_json, message_of, outcome_of
from stele.rpc.flight_plan import Planned, command_of, info_of
from stele.rpc.identity import Identity, ensure_same_fork
from stele.rpc.inflow import InflowWatch
from stele.rpc.logging import OncePer
from stele.rpc.places import YIELD_S, Place, Places
from stele.rpc.resolve import join_address
from stele.rpc.stall import Watchdog
from stele.rpc.ticket import CopyTicket, ScanCommand, Ticket, decode_ticket

log = structlog.get_logger("stele.rpc.flight")

SCANS_MAX = 32
COPIES_MAX = 64
STALLED_S = 60.0
"""A reader that takes nothing for this long loses its place and its view. If it goes on, an error tells it to
scan again; our readers continue after the last row. Its thread stays in gRPC, where no call ends it, until
it goes on or leaves."""
_CLOSE_S = 5.0


Rows: TypeAlias = pa.RecordBatch | tuple[pa.RecordBatch, bytes]
"""A batch; with the metadata that travel beside it, if there are any."""


class ScanProvider(Protocol):
    """The scans that a node serves. Called in Flight's threads; may block and raise SteleError."""

    def plan(self, command: ScanCommand) -> Planned:
        """Plan a scan of a table, or of one tablet."""
        ...

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[Rows]]:
        """Wait until the ticket's snapshot can be served, then yield its rows. Closed early if the client
        leaves.

        Checks tablet, schema version and snapshot. The cluster was already checked.
        """
        ...


class CopyProvider(Protocol):
    """The files of a node's copy sessions. Called in Flight's threads; may block and raise SteleError."""

    def fetch(self, ticket: CopyTicket) -> Iterable[pa.RecordBatch]:
        """The bytes that a ticket asks for, in order, in frames of stele.rpc.copy_frames.

        Closed early if the receiver leaves. Checks caller and session. The cluster was already checked.
        """
        ...


@functools.cache
def keep_grpc() -> None:
    """Keep Flight's gRPC library loaded until the process ends. Call before anything of Flight is made.

    With its last object the library frees what its threads share. But for up to 10 s a thread may still
    handle a stream whose reader took nothing (`run_poller` in its tcp_posix.cc). It would then crash the
    process. So one object, which connects to nobody, is never freed.
    """
    forks.use()
    _never_free(fl.FlightClient("grpc+tcp://127.0.0.1:9"))


def _never_free(made: object) -> None:
    """Keep an object even through the interpreter's end, where a list of kept objects would be freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


class FlightServer:
    """A Flight server. It answers as soon as it is made. `host` and `port` as for --listen; port 0 picks one.

    pyarrow's `serve` is not used. It only waits for the end, and its handlers for SIGTERM and SIGINT would
    inform the node only after the last reader has gone. Here the node is informed first and the server last.
    """

    def __init__(
        self,
        host: str,
        port: int,
        cluster_id: str,
        scans: ScanProvider,
        copies: CopyProvider,
        *,
        fork_id: str = "",
        scans_max: int = SCANS_MAX,
        copies_max: int = COPIES_MAX,
        stalled_s: float = STALLED_S,
    ) -> None:
        keep_grpc()
        location = f"grpc+tcp://{join_address(host, port)}"
        try:
            identity = Identity(ClusterId(cluster_id), fork_id=fork_id)
            self._server = _Server(location, identity, scans, copies, scans_max, copies_max, stalled_s)
        except (pa.ArrowException, fl.FlightError, OSError) as exc:
            raise Rejected(
                f"cannot listen for Flight at {host}:{port}: the port is in use, or the address is not this "
                "machine's; stop what uses it or choose another with --flight-port"
            ) from exc
        _never_free(self._server)  # freeing one right after its end has crashed a process
        self.port: int = self._server.port
        self._inflow = InflowWatch(self.port, self._brought_too_much)
        self._server.came = self._inflow.came

    def close(self) -> None:
        """Refuse new streams and end those in progress. Blocks until they have ended, except for stuck
        readers.

        Call it in a thread."""
        self._server.stop()
        self._inflow.close()
        ending = threading.Thread(target=self._server.shutdown, name="flight-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            log.warning(
                "the flight server did not end in time, because readers take nothing; it is abandoned",
                seconds=_CLOSE_S,
            )
        else:
            self._server.release()

    def _brought_too_much(self, host: str) -> None:
        event = "a flight connection was ended: it sent far more than commands and tickets need"
        self._server.once.tell(log.warning, event, host, "inflow", source=host)


class _Server(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(
        self,
        location: str,
        identity: Identity,
        scans: ScanProvider,
        copies: CopyProvider,
        scans_max: int,
        copies_max: int,
        stalled_s: float,
    ) -> None:
        self.stopping = threading.Event()
        self.stalled_s = stalled_s
        self.watchdog = Watchdog()
        self._identity = identity
        self._scans = scans
        self._copies = copies
        self._scan_places = Places(scans_max)
        self._copy_places = Places(copies_max)
        self.once = OncePer()
        self._times = threading.Lock()
        self.came: Callable[[str, int], None] = lambda peer, size_bytes: None
        super().__init__(location)

    def stop(self) -> None:
        """End all streams: they yield nothing more, and those of stalled readers release what they hold."""
        self.stopping.set()
        self.watchdog.close()
        self.watchdog.cancel_all()

    def release(self) -> None:
        """Release what the server used. The server has ended, but its own object is never freed."""
        for name in ("_scans", "_copies"):
            self.__dict__.pop(name, None)

    def took(self, kind: str, outcome: str, since_s: float) -> None:
        """Count the time that a client waited for the node. Called in any thread."""
        seconds = time.perf_counter() - since_s
        with self._times:
            metrics.client_request_seconds.cell(kind, outcome).add(seconds)

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        came_s = time.perf_counter()
        try:
            self.came(str(context.peer()), len(descriptor.serialize()))
            planned = self._scans.plan(command_of(descriptor))
        except Exception as exc:  # noqa: BLE001 - the border: foreign errors are logged and sent as INTERNAL
            error = self._refused(context, exc, "GetFlightInfo")
            self.took("plan", outcome_of(error), came_s)
            raise to_flight_error(error) from None
        self.took("plan", "ok", came_s)
        return info_of(planned, descriptor)

    def do_get(self, context: Any, raw: Any) -> Any:
        came_s: float | None = time.perf_counter()
        try:
            self.came(str(context.peer()), len(raw.ticket))
            ticket = decode_ticket(bytes(raw.ticket))
            if ticket.cluster_id != self._identity.cluster_id:
                raise Rejected(
                    f"this is cluster {self._identity.cluster_id[:8]}; "
                    f"the ticket is for cluster {ticket.cluster_id[:8] or 'none'}",
                    code=Code.WRONG_CLUSTER,
                )
            ensure_same_fork(self._identity, ticket.fork_id, of_node=isinstance(ticket, CopyTicket))
            if isinstance(ticket, CopyTicket):
                came_s = None  # asked for by a node, not by a client
            source = str(context.peer()).rpartition(":")[0]
            schema, batches, place = self._open(ticket, source)
        except Exception as exc:  # noqa: BLE001 - the border, as above
            error = self._refused(context, exc, "DoGet")
            if came_s is not None:
                self.took("scan", outcome_of(error), came_s)
            raise to_flight_error(error) from None
        return fl.GeneratorStream(schema, _Batches(self, context, batches, place, came_s))

    def _open(self, ticket: Ticket | CopyTicket, source: str) -> tuple[pa.Schema, Iterable[Rows], Place]:
        places = self._copy_places if isinstance(ticket, CopyTicket) else self._scan_places
        place = places.take(source)
        if place is None:
            metrics.flight_throttled.labels("place").inc()
            what = "copies are read from" if isinstance(ticket, CopyTicket) else "scans run on"
            raise Retryable(f"too many {what} this node; try another replica", code=Code.THROTTLED)
        try:
            if isinstance(ticket, CopyTicket):
                return FRAMES, self._copies.fetch(ticket), place
            schema, batches = self._scans.scan(ticket)
            return schema, batches, place
        except BaseException:
            place.release()
            raise

    def _not_served(self, context: Any, *arguments: Any) -> Any:
        self.came(str(context.peer()), 0)
        error = Rejected("only GetFlightInfo and DoGet are served here", code=Code.UNSUPPORTED_VERSION)
        raise to_flight_error(self._refused(context, error, "Flight"))

    get_schema = list_flights = list_actions = do_action = do_put = do_exchange = _not_served

    def _refused(self, context: Any, exc: BaseException, where: str) -> SteleError:
        error = as_stele_error(exc, where=where)
        source = str(context.peer()).rpartition(":")[0]
        if isinstance(error, Rejected):
            self.once.tell(log.warning, "flight refused", source, error.code, source=source, error=str(error))
        return error


class _Batches(Iterator[Rows]):
    """The batches of one stream. The stream gives its place back when the batches end, or when the client has
    left or takes nothing. `came_s`: when the client asked for its scan; None: it is no scan, and is not timed."""

    def __init__(
        self,
        server: _Server,
        context: Any,
        batches: Iterable[Rows],
        place: Place,
        came_s: float | None,
    ) -> None:
        self._server = server
        self._came_s = came_s
        self._kind = "scan"  # of what is timed next; later batches are pages
        self._place = place
        self._context = context
        self._batches = iter(batches)
        self._lock = threading.Lock()
        self._open = True
        self._making = False
        self._stalled_s = 0.0  # if ended: how long its reader had taken nothing
        # Not a strong reference: gRPC frees a stream whose client left, and that must end it.
        me = weakref.ref(self)

        def stall() -> None:
            stream = me()
            if stream is not None:
                stream._stall(server.stalled_s)

        def give_way() -> None:
            stream = me()
            if stream is not None and time.monotonic() - place.idle_since_s >= YIELD_S:
                stream._stall(YIELD_S)

        place.give_way = give_way
        self._watched = server.watchdog.watch(stall)

    def __next__(self) -> Rows:
        with self._lock:
            self._making = True
            self._watched.due = self._place.idle_since_s = math.inf
        try:
            self._go_on()
            if not self._open:
                raise StopIteration
            batch = self._next()
        except StopIteration:
            self.close()
            raise
        except Exception as exc:  # noqa: BLE001 - the border, as above
            self.close()
            raise to_flight_error(as_stele_error(exc, where="DoGet")) from None
        with self._lock:
            self._making = False
            self._place.idle_since_s = time.monotonic()
            self._watched.due = self._place.idle_since_s + self._server.stalled_s
        return batch

    def _next(self) -> Rows:
        """Make a batch, and count the time. The first one counts from when the scan was asked for."""
        if self._came_s is None:
            return next(self._batches)
        since_s = self._came_s if self._kind == "scan" else time.perf_counter()
        outcome = "ok"
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as exc:
            outcome = outcome_of(exc) if isinstance(exc, SteleError) else "failed"
            raise
        finally:
            self._server.took(self._kind, outcome, since_s)
            self._kind = "page"

    def _go_on(self) -> None:
        if self._server.stopping.is_set():
            raise Retryable("the node is stopping; continue at another replica", code=Code.UNAVAILABLE)
        if self._context.is_cancelled():
            raise Retryable("the client has left", code=Code.UNAVAILABLE)
        if self._stalled_s:
            raise Retryable(
                f"the reader took nothing for {self._stalled_s:g} s, so it has lost its place; "
                "scan again after the last row",
                code=Code.TIMED_OUT,
            )

    def _stall(self, after_s: float) -> None:
        """End the stream if its reader has taken nothing for `after_s`. Called by another thread."""
        with self._lock:
            if self._making or not self._open:
                return
            self._stalled_s = after_s
            self._close()
        if not self._server.stopping.is_set():
            metrics.flight_stalled.inc()
            self._server.once.tell(
                log.warning,
                "ended a reader that took nothing",
                self._place.source,
                "stalled",
                source=self._place.source,
                seconds=after_s,
            )

    def close(self) -> None:
        """End the stream. A second call does nothing."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._server.watchdog.forget(self._watched)
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()
            self._place.release()

    def __del__(self) -> None:
        self.close()


def to_flight_error(exc: SteleError) -> Exception:
    """The Flight status for an error. Its code is in the extra info."""
    kind = fl.FlightUnavailableError if isinstance(exc, Retryable) else fl.FlightServerError
    error: Exception = kind(message_of(exc), extra_info=error_to_json(exc))
    return error


def from_flight_error(exc: BaseException, *, where: str) -> SteleError:
    """The error of a failed Flight call. `where` is the server's address."""
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

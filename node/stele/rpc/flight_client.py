"""The calling side of Arrow Flight: connections by address, and streams with bounded waits. Used by scans and
copies.

Blocks, so call it in threads. Invariant: a stream raises only SteleErrors. Nobody waits for a silent server
longer than STALL_TIMEOUT_S, or after `stop` was set.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from threading import Event, Lock
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from stele.model.errors import Closed, Code, Retryable
from stele.model.foreign import ensure_safe
from stele.rpc.flight import from_flight_error, keep_grpc
from stele.rpc.resolve import split_address
from stele.rpc.stall import Watchdog, open_stream, silent, stopped

CONNECT_TIMEOUT_S = 1.0
STALL_TIMEOUT_S = 15.0
"""A server that sends nothing for this long is given up. A node sends an empty batch when it finds nothing
for long."""
_AVOID_S = 5.0
"""All streams skip a silent node for this long, so that each need not find out itself."""
REST_S = 5.0
"""A connection idle for this long may be dead without notice. So it is replaced by a new one: dialling shows
at once whether the server is there."""


class _Connection:
    """`heard`: when it last received something, on time.monotonic."""

    __slots__ = ("client", "heard")

    def __init__(self, client: Any) -> None:
        self.client = client
        self.heard = time.monotonic()

    @property
    def rested(self) -> bool:
        return time.monotonic() - self.heard > REST_S


class FlightConnections:
    """Flight connections by address, shared by threads. `options` are gRPC's channel arguments."""

    def __init__(self, options: tuple[tuple[str, int], ...] = ()) -> None:
        self._options = list(options)
        self._connections: dict[str, _Connection] = {}
        self._avoided: dict[str, float] = {}
        self._lock = Lock()
        self.closed = False
        self.watchdog = Watchdog()

    def get(self, address: str) -> Any:
        """Return a connection to `address`. One that received something lately is shared. Fails at once if
        nobody listens.

        gRPC alone would wait 20 s for a dead machine.

        Raises:
            Retryable: UNAVAILABLE, also for a while after `avoid`.
            Closed: after `close`.
        """
        if self.closed:
            raise Closed()
        if not address:  # the node has not reported it to the masters yet
            raise Retryable("the replica's Flight address is not known yet", code=Code.UNAVAILABLE)
        with self._lock:
            found = self._connections.get(address)
            avoided = self._avoided.get(address, 0.0) > time.monotonic()
        if avoided:
            raise Retryable(f"{address} did not answer a moment ago", code=Code.UNAVAILABLE)
        if found is not None and not found.rested:
            return found.client
        host, port = split_address(address)
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except OSError as exc:
            raise Retryable(
                f"cannot connect to {address}: {exc.strerror or exc}", code=Code.UNAVAILABLE
            ) from exc
        keep_grpc()
        client = fl.connect(f"grpc+tcp://{address}", generic_options=self._options)
        with self._lock:
            if not self.closed:
                found = self._connections.get(address)
                if found is None or found.rested:  # no other thread was faster
                    found = self._connections[address] = _Connection(client)
                return found.client
        client.close()
        raise Closed()

    def heard(self, address: str, client: Any) -> None:
        """Note that something was received on this connection."""
        with self._lock:
            found = self._connections.get(address)
            if found is not None and found.client is client:
                found.heard = time.monotonic()

    def drop(self, address: str) -> None:
        """Forget a failed connection. It is closed when its last reader releases it."""
        with self._lock:
            self._connections.pop(address, None)

    def avoid(self, address: str) -> None:
        """Skip this address for a while: nobody answers, although connections are open."""
        with self._lock:
            self._avoided[address] = time.monotonic() + _AVOID_S

    def close(self) -> None:
        """Close all connections for good. Readers in progress fail."""
        self.watchdog.close()
        with self._lock:
            self.closed = True
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.client.close()


class FlightStream:
    """One DoGet, read in the calling thread: `for batch in FlightStream(...)`, once.

    To end it from another thread set `stop`, then call `cancel`.
    """

    def __init__(
        self,
        connections: FlightConnections,
        address: str,
        ticket: bytes,
        stop: Event,
    ) -> None:
        self._connections = connections
        self._address = address
        self._ticket = ticket
        self._stop = stop
        self._reader: Any = None

    def cancel(self) -> None:
        """Abort a read that waits."""
        reader = self._reader
        if reader is not None:
            reader.cancel()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Raises SteleError: what the server raised; UNAVAILABLE; TIMED_OUT if the server is silent."""
        address, stall_s = self._address, STALL_TIMEOUT_S
        reader = watched = None
        try:
            client = self._connections.get(address)
            wanted = fl.Ticket(self._ticket)
            self._reader = reader = open_stream(lambda: client.do_get(wanted), stall_s, self._stop, address)
            watched = self._connections.watchdog.watch(reader.cancel)
            if self._stop.is_set():  # `cancel` came before there was a reader
                raise stopped(address)
            while True:
                watched.due = time.monotonic() + stall_s
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    reader = None
                    return
                watched.due = math.inf
                self._connections.heard(address, client)
                ensure_safe(chunk.data)
                yield chunk.data
        except (fl.FlightError, pa.ArrowException, OSError) as exc:
            reader = None
            if watched is not None and watched.gone:
                self._connections.avoid(address)
                raise silent(address, stall_s) from exc
            raise from_flight_error(exc, where=address) from exc
        except Retryable as exc:
            if exc.code is Code.TIMED_OUT:
                self._connections.avoid(address)
            raise
        finally:
            self._reader = None
            if watched is not None:
                self._connections.watchdog.forget(watched)
            if reader is not None:
                reader.cancel()

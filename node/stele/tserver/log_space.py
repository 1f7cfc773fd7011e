"""Keeps the node's log small: removes segments that no replica needs, and writes old entries again at the
log's end.

Called by maintenance. A few old entries may keep many segments from being removed. Once the entries are
written again, the segments can go.

Invariant: the bytes written again are at most those of new entries in the same time, plus HELD_BYTES. So a
log that must keep most of its entries is not rewritten for ever.
"""

from __future__ import annotations

import contextlib
from functools import partial

import structlog

from stele.consensus.ports import Host
from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Corrupt, Rejected, SteleError
from stele.model.ids import OpId, StreamKey
from stele.tablet.files import translate
from stele.tserver.replicas import Replicas
from stele.tserver.wheel import Wheel
from stele.wal.log import Log
from stele.wal.report import Pin

log = structlog.get_logger("stele.tserver.log_space")

HELD_BYTES = 256 << 20
"""How many bytes of the log one replica's unflushed entries may pin, counting entries of others that come
after them.

A replica that pins more is flushed. If no flush helps, its entries are written again. On small volumes the
bound is lower: see HELD_SHARE.
"""
HELD_SHARE = 4
"""On small volumes the bound is the bytes that an anchor may hold, divided by this number."""
WRITE_AGAIN_BYTES = 32 << 20
"""The most bytes of one replica that are written again. A leader with half of that uncommitted takes no more
writes.
"""


class LogSpace:
    """The log space of one node. Lets the log drop segments, and tells replicas whose log now begins
    later."""

    def __init__(self, replicas: Replicas, node_log: Log, host: Host) -> None:
        self._replicas = replicas
        self._node_log = node_log
        self._host = host
        self._wheel = Wheel(replicas)
        self._untold: dict[StreamKey, OpId] = {}  # where streams begin now, for replicas that do not run yet
        self._under_way: set[StreamKey] = set()
        self._refused: dict[StreamKey, int] = {}
        self._written_again_bytes = 0
        self._others_bytes = 0
        self._credit_bytes = HELD_BYTES

    @property
    def held_max(self) -> int:
        """How many bytes of the log the unflushed entries of one replica may hold."""
        return min(HELD_BYTES, self._node_log.anchor_bytes_max // HELD_SHARE)

    async def collect(self) -> None:
        """Do one round: let the log drop segments, and write entries again that pin too many segments.

        Raises:
            Corrupt: IO_ERROR, the log has failed.
        """
        now_ms = self._host.now_ms()
        for replica in self._wheel.turn():
            if replica.running:
                replica.storage.anchor_log(now_ms)
            elif replica.state is ReplicaState.FAILED:
                self._let_go(replica)
                self._wheel.keep(replica)
        await self._write_again()
        collected = await self._host.in_thread(self._node_log.collect)
        self._tell({**self._untold, **collected.starts})

    def _tell(self, starts: dict[StreamKey, OpId]) -> None:
        """Tell the replicas whose logs now begin later."""
        self._untold = {}
        for key, start in starts.items():
            replica = self._replicas.by_key(key)
            if replica is not None and replica.running:
                replica.storage.log_collected(start)
            elif replica is not None:
                self._untold[key] = start

    def _let_go(self, replica: Replica) -> None:
        """Release the log that a FAILED replica pins, once a majority without it has more entries. That is so
        when the commit index is above all that this replica had.

        Until then it may be the only surviving replica that has its entries.
        """
        if replica.superblock.young_witness:
            return
        with contextlib.suppress(Rejected):  # the record that created its stream may have been lost
            stream = self._node_log.stream(replica.superblock.key)
            if replica.committed_elsewhere > stream.last_opid.index:
                stream.abandon_entries()

    # --- written again

    async def _write_again(self) -> None:
        """Write the entries again that pin too much of the log, if no flush helps. An example is a group
        without a majority.

        A later collection removes the segments that held them, once the new copy is synced.
        """
        self._earn()
        pins = self._node_log.pins(above_bytes=self.held_max)
        self._refused = {pin.key: pin.index for pin in pins if self._refused.get(pin.key) == pin.index}
        for pin in pins:
            replica = self._replicas.by_key(pin.key)
            if self._credit_bytes <= 0:
                break
            if (
                replica is not None
                and pin.key not in self._under_way
                and pin.key not in self._refused
                and _no_flush_helps(replica)
            ):
                await self._move(pin, replica)

    def _earn(self) -> None:
        """Add the bytes of new entries to the credit, which bounds how many old bytes may be written again."""
        others = self._node_log.stats.bytes_written - self._written_again_bytes
        if others > self._others_bytes:
            self._credit_bytes += others - self._others_bytes
            self._others_bytes = others
        self._credit_bytes = min(self._credit_bytes, self.held_max)

    async def _move(self, pin: Pin, replica: Replica) -> None:
        done = partial(self._under_way.discard, pin.key)
        self._under_way.add(pin.key)
        size = 0
        try:
            stream = self._node_log.stream(pin.key)
            size = await self._host.in_thread(stream.write_again, WRITE_AGAIN_BYTES, done)
        except (SteleError, OSError, MemoryError) as exc:
            error = translate(exc, "reading the log") if isinstance(exc, OSError) else exc
            log.warning(
                "entries that pin old segments could not be written again",
                stream=str(pin.key),
                held_bytes=pin.bytes,
                error=str(error),
            )
            if isinstance(error, Corrupt):
                replica.fail(f"log: {error}")
            if isinstance(error, (Corrupt, Rejected)):
                self._refused[pin.key] = pin.index
        if not size:
            done()
            return
        self._written_again_bytes += size
        self._credit_bytes -= size
        log.info(
            "wrote entries again, so that old segments can go",
            stream=str(pin.key),
            held_bytes=pin.bytes,
            bytes=size,
        )


def _no_flush_helps(replica: Replica) -> bool:
    """Whether the replica would keep its log even if its store were flushed."""
    if replica.state is ReplicaState.FAILED:
        return True
    machine, core = replica.machine, replica.core
    if not replica.running or core is None:
        return False
    if machine is None:
        return True
    return machine.applied == machine.flushed and core.log.unhanded_bytes <= WRITE_AGAIN_BYTES

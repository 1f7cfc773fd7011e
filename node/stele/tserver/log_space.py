"""What the node's log holds, for all its replicas at once: who needs what of it, what nobody needs any more, and what is
written again at its end, so that it holds no more than it must. Called by maintenance.

Invariant: what is written again is no more than others wrote meanwhile, but for HELD_BYTES: a log most of which has to stay
is not written round and round.
"""

from __future__ import annotations

import contextlib
from functools import partial

import structlog

from stele.consensus.ports import Host
from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Corrupt, Rejected, SteleError
from stele.model.ids import OPID_NONE, OpId, StreamKey
from stele.tablet.files import translate
from stele.tserver.replicas import Replicas
from stele.wal.log import Log
from stele.wal.report import Pin

log = structlog.get_logger("stele.tserver.log_space")

HELD_BYTES = 256 << 20
"""Of the log: what the unflushed entries of one replica may hold, all that others wrote behind them. On small volumes less, see
HELD_SHARE. Whose entries hold more is flushed or, where no flush helps, has them written again."""
HELD_SHARE = 4
"""Of what an anchor may hold, one part of so many."""
WRITE_AGAIN_BYTES = 32 << 20
"""Of one replica at most. A leader takes no more writes with half of it uncommitted."""


class LogSpace:
    """Lets the log drop segments, and tells the replicas whose log now begins later."""

    def __init__(self, replicas: Replicas, node_log: Log, host: Host) -> None:
        self._replicas = replicas
        self._node_log = node_log
        self._host = host
        self._starts: dict[StreamKey, OpId] = {}
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
        """One round.

        Raises:
            Corrupt: IO_ERROR, the log has failed.
        """
        now_ms = self._host.now_ms()
        for replica in self._replicas:
            if replica.running:
                replica.storage.anchor_log(now_ms)
            elif replica.state is ReplicaState.FAILED:
                self._let_go(replica)
        await self._write_again()
        await self._host.in_thread(self._node_log.collect)
        starts: dict[StreamKey, OpId] = {}
        for replica in self._replicas:
            if not replica.running:
                continue
            start, key = replica.storage.stream.start, replica.superblock.key
            starts[key] = start
            if start not in (OPID_NONE, self._starts.get(key)):
                replica.storage.log_collected(start)
        self._starts = starts

    def _let_go(self, replica: Replica) -> None:
        """What a FAILED replica's log holds is held by a majority without it once more is committed than it ever had:
        it did not acknowledge that. Until then it may be one of a majority, and the only one that is left of it."""
        if replica.superblock.young_witness:
            return
        with contextlib.suppress(Rejected):  # what created its stream may have been lost
            stream = self._node_log.stream(replica.superblock.key)
            if replica.committed_elsewhere > stream.last_opid.index:
                stream.abandon_entries()

    # --- written again

    async def _write_again(self) -> None:
        """What no flush lets go of, where it holds too much: as of a group without a majority, whose entries are not committed.
        The segments that held it go with a later collection, once it is synced."""
        self._earn()
        pins = [pin for pin in self._node_log.pins() if pin.bytes > self.held_max]
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
        """As much may be written again as others have written."""
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
            log.warning("log not written again", stream=str(pin.key), held_bytes=pin.bytes, error=str(error))
            if isinstance(error, Corrupt):
                replica.fail(f"log: {error}")
            if isinstance(error, (Corrupt, Rejected)):
                self._refused[pin.key] = pin.index
        if not size:
            done()
            return
        self._written_again_bytes += size
        self._credit_bytes -= size
        log.info("log written again", stream=str(pin.key), held_bytes=pin.bytes, bytes=size)


def _no_flush_helps(replica: Replica) -> bool:
    """Whether what a replica's stream holds stays however often its store is flushed."""
    if replica.state is ReplicaState.FAILED:
        return True
    machine, core = replica.machine, replica.core
    if not replica.running or core is None:
        return False
    if machine is None:
        return True
    return machine.applied == machine.flushed and core.log.unhanded_bytes <= WRITE_AGAIN_BYTES

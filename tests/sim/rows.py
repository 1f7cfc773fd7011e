"""The store and the log of one simulated node, as the node's maintenance and its copies use them.

Invariant: a checkpoint is what the store holds on disk; rows only in memory are in no copy.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stele.consensus.bootstrap import STORE, open_machine
from stele.consensus.superblock import DataState
from stele.model.config import Configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Retryable
from stele.model.ids import OPID_NONE, OpId, StreamKey, TabletId
from stele.tablet.compaction import run_job
from stele.tablet.store import TabletStore

if TYPE_CHECKING:
    from tests.sim.node import SimNode

NEIGHBOUR = TabletId("8" * 32)
_HELD_MS = 5_000.0
_LOOK_MS = 50.0
_BEHIND_MAX = 20
"""How many entries a copy for healing may lack."""


class Checkpoint(NamedTuple):
    """What a store holds on disk: all up to `opid`, under `config`. `fill` makes a directory with it."""

    opid: OpId
    config: Configuration
    fill: Callable[[Path], object]


class Rows:
    """Rows and log of one node."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def flush(self) -> None:
        """The store flushes what is in memory."""
        node, replica = self._node, self._node.replica
        if replica is not None and replica.running and replica.machine is not None:
            node.world.met["a flush"] += 1
            node.run(replica.storage.flush(), _heard)

    def merge(self) -> None:
        """The store of a table merges files, all of them or some."""
        node, replica = self._node, self._node.replica
        if replica is not None and replica.running and isinstance(replica.machine, TabletStore):
            node.run(self._merge(replica.machine, full=node.world.rng.random() < 0.5), self._merged)

    async def _merge(self, machine: TabletStore, *, full: bool) -> None:
        job = machine.plan_compaction(full=full)
        if job is not None:
            result = await self._node.host.in_thread(run_job, job)
            await self._node.host.in_thread(machine.install_compaction, result)
            self._node.world.met["a merge"] += 1

    def _merged(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._node.replica is not None and self._node.replica.running:
            self._node.world.failed(f"a merge of {self._node.replica_id} ended with {error!r}", error)

    def collect(self) -> None:
        """The log drops what nobody needs."""
        node = self._node
        if node.space is not None and node.log is not None and node.log.failed is None:
            node.run(node.space.collect(), _heard)

    def neighbour_writes(self) -> None:
        """A second stream in the same log, beside the replica's."""
        node = self._node
        log, key = node.log, StreamKey(NEIGHBOUR, node.replica_id)
        if log is None or log.failed is not None or key in log.recovery.failed:
            return
        stream, rng = node.stream(key), node.world.rng
        index = stream.last_opid.index + 1
        try:
            stream.append_entries((Entry(1, index, EntryKind.WRITE, index, bytes(rng.randint(1, 300))),))
        except Retryable:
            return
        if rng.random() < 0.2:
            stream.set_flushed(node.twins[key].durable.last.index)

    # Copies

    def checkpoint(self) -> Checkpoint | None:
        """What the store holds on disk, as a copy takes it; None if it holds nothing."""
        replica = self._node.replica
        if replica is None or not replica.running or replica.machine is None:
            return None
        if replica.machine.flushed == OPID_NONE:
            return None
        # The files may hold more than `flushed` says: a flush is on disk before its end is known.
        source = self._node.directory / "checkpoint"
        shutil.rmtree(source, ignore_errors=True)
        opid = replica.machine.checkpoint(source).opid
        return Checkpoint(
            opid, replica.members.config_at(opid.index), lambda target: shutil.copytree(source, target)
        )

    def held_checkpoint(self) -> Checkpoint | None:
        """As `checkpoint`, if it holds nearly everything and the log after it stays for a while. Otherwise a
        flush begins."""
        node, found, replica = self._node, self.checkpoint(), self._node.replica
        if replica is None or found is None or found.opid.index + _BEHIND_MAX < replica.applied_index:
            self.flush()
            return None
        stream = node.stream(node.superblock.key)
        stream.anchor("copies", found.opid.index + 1)
        node.world.at(node.world.now + _HELD_MS, stream.release, "copies")
        return found

    def fetch(self, checkpoint: Checkpoint, again: Callable[[], None]) -> None:
        """The rows of a witness arrive, and are installed a while later. If the node ends in between, it
        calls `again`."""
        node, world = self._node, self._node.world
        target = node.directory / STORE
        shutil.rmtree(target, ignore_errors=True)  # left by a copy that was cut off
        checkpoint.fill(target)
        took = world.rng.uniform(1.0, 300.0)
        world.faults.copying(node, took)
        world.at(world.now + took, self._installed, checkpoint.opid, node.life, again)

    def _installed(self, opid: OpId, life: int, again: Callable[[], None]) -> None:
        node, world, replica = self._node, self._node.world, self._node.replica
        if node.life != life:
            world.met["a copy cut off"] += 1
            again()
            return
        if replica is not None and replica.core is not None:
            try:
                reached = replica.storage.log_reaches(opid)
            except Retryable:  # its log begins later, or it runs no more
                again()
                return
            if not reached:
                world.met["a copy waited for the log"] += 1
                world.at(world.now + _LOOK_MS, self._installed, opid, life, again)
                return
        world.met["a witness got its rows"] += 1
        node.superblock = replace(node.superblock, data_state=DataState.READY, witness_start=OPID_NONE)
        if replica is not None and replica.core is not None:
            machine = open_machine(node.superblock, node.directory)
            node.run(replica.rows_arrived(node.superblock, machine), _heard)


def _heard(task: asyncio.Task[Any]) -> None:
    """Ignore the results of flushes and collections: they concern only the node."""
    if not task.cancelled():
        task.exception()

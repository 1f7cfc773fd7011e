"""Starts a Replica from its files and its stream in the log. Called by the tablet manager and masters.

Blocking work runs in the node's threads, so many replicas bootstrap at once.

Invariant: a replica is never started with less than it once acknowledged. If store, log and superblock do not
fit together, the replica becomes FAILED and its files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from stele.consensus.files import make_directory
from stele.consensus.ports import Host, NodeLog, ReplicaOptions
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState, Superblock
from stele.model.cluster_version import FIRST_CLUSTER_VERSION
from stele.model.config import Configuration
from stele.model.errors import Corrupt, Retryable, SteleError, of_later_program, unknown_here
from stele.model.ids import OpId, ReplicaId
from stele.model.schema import Schema
from stele.raft.events import InitialState
from stele.raft.ports import LoadedLog, fold_records
from stele.tablet.checksums import SumsInside
from stele.tablet.files import translate
from stele.tablet.machine import StateMachine

log = structlog.get_logger("stele.consensus")

STORE = "store"


def create_machine(superblock: Superblock, directory: Path) -> StateMachine:
    """Create an empty store of the replica's kind. On return it survives power loss. Blocks.

    Raises:
        Rejected: UNSUPPORTED_VERSION, this program does not know the kind. ALREADY_PRESENT, a store exists.
    """
    make_directory(directory / STORE)
    if superblock.kind == "table":
        from stele.tablet.store import TabletStore

        table: StateMachine = TabletStore.create(directory / STORE, Schema.from_json(superblock.schema))
        return table
    if superblock.kind == "keyspace":
        from stele.tablet.keyspace import KeySpace

        return KeySpace.create(directory / STORE)
    raise unknown_here("tablet kind", superblock.kind)


def open_machine(
    superblock: Superblock,
    directory: Path,
    name: str = STORE,
    cluster_version: Callable[[], int] = lambda: FIRST_CLUSTER_VERSION,
) -> StateMachine:
    """Open the store as last flushed; `name` is its folder in the replica's directory. Blocks.

    `cluster_version`: see `Host.cluster_version`. The store writes its files in a format that all programs of
    that version read.

    Raises:
        Corrupt: files are missing or damaged.
        Rejected: UNSUPPORTED_VERSION, a later release wrote the store, or its kind is unknown.
    """
    if superblock.kind == "table":
        from stele.tablet.colformat import version_for
        from stele.tablet.store import StoreOptions, TabletStore

        options = StoreOptions(file_version=lambda: version_for(cluster_version()))
        table: StateMachine = TabletStore.open(directory / name, options)
        return table
    if superblock.kind == "keyspace":
        from stele.tablet.keyspace import KeySpace

        return KeySpace.open(directory / name)
    raise unknown_here("tablet kind", superblock.kind)


def sums_of(superblock: Superblock) -> SumsInside:
    """Return the function that finds the checksums inside a file of the replica's store."""
    if superblock.kind == "table":
        from stele.tablet.colformat import sums_inside

        return sums_inside
    return lambda name, size, read: None


def initial_state(
    loaded: LoadedLog, config: Configuration, flushed: OpId, hint: ReplicaId | None, *, witness: bool
) -> InitialState:
    """Make a core's initial state from its log, the configuration at the log's start and the OpId that the
    store holds.

    Raises:
        Corrupt: entries are missing between store and log, or the two hold different entries.
    """
    start = loaded.start
    last = loaded.last
    if flushed < start and not witness:
        raise Corrupt(
            f"the log begins after {start}, but the store ends at {flushed}: entries between are missing; "
            f"copy the replica anew"
        )
    if last.index < flushed.index:
        raise Corrupt(
            f"the log ends at {last}, but the store holds all up to {flushed}: the log lost acknowledged "
            f"entries; copy the replica anew"
        )
    if flushed.index > start.index:
        there = loaded.opid_at(flushed.index)
        if there != flushed:
            raise Corrupt(
                f"the log has {there}, but the store has {flushed} at that index; copy the replica anew"
            )
    return InitialState(
        term=loaded.hard_state.term,
        voted_for=loaded.hard_state.voted_for,
        log_start=start,
        config=config,
        entries=loaded.entries,
        commit_index=max(flushed.index, start.index),
        witness_without_data=witness,
        leader_hint=hint,
        skipped=loaded.skipped,
    )


async def start_replica(
    superblock: Superblock,
    directory: Path,
    node_log: NodeLog,
    host: Host,
    options: ReplicaOptions | None = None,
    *,
    replica: Replica | None = None,
) -> Replica:
    """Start a READY replica, or a young witness, whose rows are still being copied. If its files are damaged
    it becomes FAILED, and nothing is raised.

    `replica`: the object to start. The caller makes it first, so that others see it as BOOTSTRAPPING
    meanwhile.

    Raises:
        Rejected: UNSUPPORTED_VERSION, a later release wrote its files. The replica does not become FAILED,
            because a FAILED replica is replaced and its rows are erased.
        Retryable: the system has no file descriptor or memory for it now. The replica stays BOOTSTRAPPING,
            and may be started again.
    """
    replica = replica or Replica(superblock, directory, host, options)
    failed = node_log.recovery.failed.get(superblock.key)
    if failed is not None:
        replica.fail(f"its log is damaged: {failed}")
        return replica
    machine: StateMachine | None = None
    try:
        stream = node_log.stream(superblock.key)
        witness = superblock.data_state is not DataState.READY
        if not witness:
            machine = await host.in_thread(open_machine, superblock, directory, STORE, host.cluster_version)
        # Entries that the store holds may take a gibibyte. They are not read: the log knows their terms and
        # configurations.
        held = machine.flushed.index if machine is not None else 0
        loaded = await host.in_thread(lambda: fold_records(stream.load(held)))
        flushed = machine.flushed if machine is not None else loaded.start
        hint = superblock.leader_hint if loaded.hard_state.term == 0 else None
        if loaded.hard_state.voted_for == superblock.replica_id:
            hint = superblock.replica_id
        config = loaded.config if loaded.config is not None else stream.config
        initial = initial_state(loaded, config, flushed, hint, witness=witness)
        if (
            replica.state is not ReplicaState.BOOTSTRAPPING
        ):  # removed, or the node stopped, while its log was read
            if machine is not None:
                await host.in_thread(machine.close)
            return replica
        if machine is not None:
            stream.set_flushed(flushed.index)
        replica.run(stream, machine, initial)
    except (SteleError, OSError, MemoryError) as exc:
        if machine is not None:
            await host.in_thread(machine.close)
        if of_later_program(exc):
            raise
        lacking = _lacking(exc)
        if lacking is not None:
            raise lacking from exc
        replica.fail(str(exc))
    return replica


def _lacking(error: Exception) -> Retryable | None:
    """Return the error as Retryable if another attempt may succeed. None: another attempt would fail the same
    way.
    """
    if isinstance(error, MemoryError):
        return Retryable(f"opening the replica: out of memory; give the node more, or try again ({error})")
    found = translate(error, "opening the replica") if isinstance(error, OSError) else error
    return found if isinstance(found, Retryable) else None

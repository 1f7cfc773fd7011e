"""Looks at one replica on a volume that no process uses, and makes it the only voter of its tablet. For
`stele local cmeta`.

This recovers the catalog when its majority is gone, because without a leader no master can order it.
`stele.consensus.recovering` defines what is written in which order. The volume's record tells when and why.

Invariant: the volume stays locked while this works. Until the caller has accepted the loss, it changes only
what the node's next start would change anyway.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stele.consensus.bootstrap import initial_state, open_machine
from stele.consensus.recovering import SoleVoter, make_sole_voter, with_incarnation
from stele.consensus.superblock import DataState, Superblock, read_superblock, write_superblock
from stele.model.config import Configuration
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import CATALOG_TABLET_ID, OpId
from stele.model.incarnation import raised, shown
from stele.raft.core import RaftCore
from stele.raft.options import RaftOptions
from stele.raft.ports import fold_records
from stele.tserver.node_record import NodeRecord, is_formatted, read_record, write_record
from stele.tserver.volume import lock_directory
from stele.wal.appender import call_all
from stele.wal.log import Log
from stele.wal.options import LogOptions

_WRITE_S = 60.0
TERM_AHEAD, _TERM_SPREAD = 1_000, 1 << 30
"""How far the term is raised above what this replica knows: by TERM_AHEAD at least, plus a random part.

The lost replicas may have been elected since, and nodes refuse orders of a lower term than they have heard.
The random part matters if two volumes of masters are rewritten. Then the two leaders have different terms,
and nodes obey one of the two catalogs.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """One replica on the volume. `flushed`: the last entry in its synced files; `last_logged`: the end of its
    log."""

    superblock: Superblock
    term: int
    voted_for: int | None
    flushed: OpId
    last_logged: OpId
    newest: int
    config: Configuration
    node_id: str
    role: str

    @property
    def incarnation(self) -> int:
        """The tablet's incarnation, as this replica knows it."""
        return self.superblock.tablet_incarnation


def look(directory: Path, tablet_id: str = "") -> Found:
    """Read the replica of a tablet on this volume. An empty id means the catalog.

    Raises:
        Fate: Usage, a process uses the volume.
        Rejected: NOT_FOUND, there is no volume or no such replica with rows. The volume was refused as an
            older copy.
        Corrupt: its log, rows or record are damaged.
    """
    with _opened(directory) as (record, log):
        return _found(directory, record, log, tablet_id or CATALOG_TABLET_ID)


def rewrite(directory: Path, tablet_id: str, now: str, owner: str) -> Configuration:
    """Make the replica of a tablet on this volume its only voter. Returns the configuration. `now`: the time
    as text.

    Raises what `look` raises.
    """
    with _opened(directory) as (record, log):
        found = _found(directory, record, log, tablet_id or CATALOG_TABLET_ID)
        block = found.superblock
        term = found.term + TERM_AHEAD + secrets.randbelow(_TERM_SPREAD)
        order = SoleVoter(block.key, raised(found.incarnation), term)
        mine = found.config.peer(block.replica_id)
        said = (
            f"{now}: {owner} made replica {block.key} the only voter, incarnation {shown(order.incarnation)}"
        )
        write_record(directory, replace(record, rewritten=(*record.rewritten, said)))
        write_superblock(_directory_of(directory, block), with_incarnation(block, order))
        done = threading.Event()
        config = make_sole_voter(
            log.stream(block.key), record.node_id, mine.address if mine is not None else "", order, done.set
        )
        if not done.wait(_WRITE_S):
            raise Corrupt(
                f"{directory}: the log was not written within {_WRITE_S:.0f} s; check the disk",
                code=Code.IO_ERROR,
            )
        return config


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[NodeRecord, Log]]:
    if not is_formatted(directory):
        raise Rejected(
            f"--data-dir {directory}: no Stele volume is there; check the path", code=Code.NOT_FOUND
        )
    fd = lock_directory(directory)
    try:
        record = read_record(directory)
        if record.refused:
            raise Rejected(
                f"{directory} was refused as an older copy ({record.refused}); run `stele local take-back` on it "
                "first"
            )

        def dispatch(callbacks: list[Callable[[], None]]) -> None:
            call_all(callbacks)

        log = Log.open(directory / "wal", LogOptions(), record.node_id, dispatch)
        try:
            yield record, log
        finally:
            log.close()
    finally:
        os.close(fd)


def _directory_of(directory: Path, block: Superblock) -> Path:
    return directory / "tablets" / block.tablet_id / str(block.replica_id)


def _found(directory: Path, record: NodeRecord, log: Log, tablet_id: str) -> Found:
    block = _superblock(directory, tablet_id)
    failed = log.recovery.failed.get(block.key)
    if failed is not None:
        raise Corrupt(f"replica {block.key}: its log is damaged: {failed}")
    stream = log.stream(block.key)
    machine = open_machine(block, _directory_of(directory, block))
    try:
        loaded = fold_records(stream.load(machine.flushed.index))
        config = loaded.config if loaded.config is not None else stream.config
        initial = initial_state(loaded, config, machine.flushed, None, witness=False)
        core = RaftCore(RaftOptions(), block.replica_id, initial, _NoChance())
        return Found(
            block,
            core.term,
            core.voted_for,
            machine.flushed,
            core.log.last_opid,
            max(machine.last_timestamp, core.log.newest_timestamp),
            core.config,
            record.node_id,
            record.role,
        )
    finally:
        machine.close()


def _superblock(directory: Path, tablet_id: str) -> Superblock:
    """The superblock of the tablet's newest replica with rows."""
    home = directory / "tablets" / tablet_id
    numbers = (
        sorted((int(p.name) for p in home.iterdir() if p.name.isdigit()), reverse=True)
        if home.is_dir()
        else []
    )
    for number in numbers:
        block = read_superblock(home / str(number))
        if block.data_state is DataState.READY:
            return block
    raise Rejected(f"{directory} holds no replica of tablet {tablet_id} with rows", code=Code.NOT_FOUND)


class _NoChance:
    """Gives the core fixed time-outs. The core never uses them, because it is made only to read its state."""

    def randint(self, a: int, b: int, /) -> int:
        """The lowest value."""
        return a

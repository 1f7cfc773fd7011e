"""The data directory: its lock, and its owner as node.json says (node_record.py). A node opens it before
anything else.

Invariant: a volume belongs to one node of one cluster for ever, and one process uses it at a time. Every
start has a higher incarnation than the one before, synced before it is sent anywhere. Incarnations count from
the millisecond of the format. So a new volume always counts as newer than an earlier volume of the same node
id.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from stele.consensus.files import make_directory
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import ClusterId, NodeId, OpId, new_id
from stele.tserver.node_record import (
    NODE_FILE,
    Dropped,
    NodeRecord,
    is_formatted,
    read_record,
    write_record,
)
from stele.tserver.options import (
    EXIT_DISK,
    EXIT_USAGE,
    EXIT_VOLUME_EMPTY,
    EXIT_VOLUME_FOREIGN,
    EXIT_VOLUME_OLD,
)

log = structlog.get_logger("stele.tserver")
_LOCK_FILE = "LOCK"


class Fate(Exception):
    """Why this process cannot run on this volume. `exit_code`: as the command line documents. `fate`: one
    word.
    """

    def __init__(self, fate: str, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.fate = fate
        self.exit_code = exit_code


class Volume:
    """An opened, locked data directory. `new`: formatted by this start.

    `adopted`: its addresses may be those of the volume that it was copied from. So this start dials only the
    masters given to it, and those that they name.
    """

    def __init__(
        self, directory: Path, record: NodeRecord, lock_fd: int, *, new: bool = False, adopted: bool = False
    ) -> None:
        self.directory = directory
        self.new = new
        self.adopted = adopted
        self.record = record
        self._lock_fd = lock_fd
        self._updating = threading.Lock()

    @property
    def wal_directory(self) -> Path:
        """Where the log lives."""
        return self.directory / "wal"

    @property
    def tablets_directory(self) -> Path:
        """Where replicas live."""
        return self.directory / "tablets"

    @property
    def copies_directory(self) -> Path:
        """Where copy sessions link their checkpoints."""
        return self.directory / "copies"

    def update(self, change: Callable[[NodeRecord], NodeRecord]) -> None:
        """Replace node.json with what `change` makes of it, durably.

        Writes nothing if nothing changes, or after `close`. Blocks; any thread.
        """
        with self._updating:
            if self._lock_fd < 0:
                return
            record = change(self.record)
            if record != self.record:
                write_record(self.directory, record)
                self.record = record

    def raise_fences(self, catalog: OpId, driver_epoch: int) -> None:
        """Raise the bounds below which orders are refused; never lower them. Blocks; any thread."""
        self.update(
            lambda record: replace(
                record,
                catalog=max(record.catalog, catalog),
                driver_epoch=max(record.driver_epoch, driver_epoch),
            )
        )

    def remember_masters(self, masters: tuple[str, ...], given: tuple[str, ...]) -> None:
        """Store the newest list of masters, the --masters of the start that learned it, and whether the
        volume is adopted. Blocks; any thread."""
        self.update(
            lambda record: replace(record, masters=masters, given=given or record.given, adopted=self.adopted)
        )

    def remember_fenced(self, fenced: bool) -> None:
        """Store whether the node is fenced, for its next start. Blocks; any thread."""
        self.update(lambda record: replace(record, fenced=fenced))

    def remember_dropped(self, dropped: Dropped) -> None:
        """Store which tables were dropped and serve nobody, for the node's next start. Blocks; any thread."""
        self.update(lambda record: replace(record, dropped=dropped))

    def disk_bytes(self) -> tuple[int, int]:
        """(free, used) bytes of the file system."""
        stat = os.statvfs(self.directory)
        free = stat.f_bavail * stat.f_frsize
        return free, stat.f_blocks * stat.f_frsize - stat.f_bfree * stat.f_frsize

    def close(self) -> None:
        """Release the lock, once a change that is being written is on the disk."""
        with self._updating:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1


def lock_directory(directory: Path) -> int:
    """Lock a data directory (made if absent). Returns the file descriptor that holds the lock.

    Raises:
        Fate: its parent is missing, or another process holds the lock.
    """
    if not directory.parent.is_dir():
        raise Fate(
            "Usage",
            EXIT_USAGE,
            f"--data-dir {directory}: {directory.parent} does not exist; mount the volume there",
        )
    try:
        make_directory(directory)
        fd = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as exc:
        raise Fate("Usage", EXIT_USAGE, f"--data-dir {directory}: {exc.strerror or exc}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise Fate(
            "Usage", EXIT_USAGE, f"--data-dir {directory}: another process uses it; stop that one first"
        ) from None
    return fd


def open_volume(
    directory: Path,
    lock_fd: int,
    cluster_id: ClusterId,
    node_id: NodeId,
    role: str,
    *,
    fork_id: str = "",
    masters: tuple[str, ...] = (),
) -> Volume:
    """Open a formatted volume and raise its incarnation. `fork_id` "": as before. `masters`: those given to
    this start.

    Raises:
        Fate: VolumeForeign, the volume belongs to another cluster, node or role; or its record cannot be
            read.
    """
    try:
        record = read_record(directory)
    except Corrupt as exc:
        raise Fate("DiskCorrupt", EXIT_DISK, str(exc)) from exc
    except Rejected as exc:
        raise Fate("Usage", EXIT_USAGE, str(exc)) from exc
    if record.cluster_id != cluster_id or record.node_id != node_id:
        raise Fate(
            "VolumeForeign",
            EXIT_VOLUME_FOREIGN,
            f"{directory} belongs to node {record.node_id} of cluster {record.cluster_id}, this process is "
            f"node {node_id} of cluster {cluster_id}; attach the right volume, or an empty one under a new "
            "node id",
        )
    if record.role != role:
        raise Fate(
            "VolumeForeign",
            EXIT_VOLUME_FOREIGN,
            f"{directory} belongs to a {record.role}, this process is a {role}; start it with "
            f"`stele {record.role} run`, or attach the right volume",
        )
    if record.refused:
        raise volume_old(directory, record.refused)
    if fork_id and fork_id != record.fork_id:
        before = record.fork_id or "(none)"
        log.warning("the volume is adopted under another fork id", before=before, now=fork_id)
        record = replace(record, fork_id=fork_id, adopted=True, masters=(), given=())
    if record.taken_back:
        log.warning(
            "the masters had refused this volume; an administrator took it back", when=record.taken_back[-1]
        )
    if record.rewritten:
        log.warning(
            "an administrator made a replica on this volume the only voter of its tablet",
            when=record.rewritten[-1],
        )
    volume = Volume(directory, record, lock_fd, adopted=record.adopted)
    if not _same_masters(record, masters):
        log.warning(
            "this start was given none of the masters that were given before, so the remembered ones are not asked",
            before=record.given,
            now=masters,
        )
        volume.adopted = True
    # A record without it is compared with nothing. From now on the record has it, even if no master ever
    # answers.
    volume.update(
        lambda record: replace(record, incarnation=record.incarnation + 1, given=record.given or masters)
    )
    return volume


def _same_masters(record: NodeRecord, masters: tuple[str, ...]) -> bool:
    """Whether this start and the start that learned the masters on record were given a master in common. True
    if either was given none.

    A copy of the volume that is started by hand is given its own masters. After masters were replaced, an
    operator still gives one that stayed, or the name of all.
    """
    return not masters or not record.given or bool(set(masters) & set(record.given))


def format_volume(
    directory: Path,
    lock_fd: int,
    cluster_id: ClusterId,
    node_id: NodeId,
    role: str,
    *,
    first_masters: tuple[tuple[str, str], ...] = (),
    fork_id: str = "",
    masters: tuple[str, ...] = (),
) -> Volume:
    """Format an empty volume for this node.

    Raises:
        Fate: VolumeForeign, the directory holds files that Stele did not write.
    """
    strangers = sorted(p.name for p in directory.iterdir() if p.name not in (_LOCK_FILE, NODE_FILE + ".new"))
    if strangers:
        raise Fate(
            "VolumeForeign",
            EXIT_VOLUME_FOREIGN,
            f"{directory} has no node record but holds {', '.join(strangers[:5])}; give an empty directory",
        )
    record = NodeRecord(
        cluster_id=cluster_id,
        node_id=node_id,
        role=role,
        format_id=new_id(),
        incarnation=time.time_ns() // 1_000_000,
        formed=not first_masters,
        first_masters=first_masters,
        fork_id=fork_id,
        given=masters,
    )
    write_record(directory, record)
    return Volume(directory, record, lock_fd, new=True)


def refusal_of(directory: Path) -> str:
    """Why the masters refused this volume as an older copy; "" if they did not.

    Raises:
        Rejected: there is no volume.
        Corrupt: the volume's record is damaged.
    """
    if not is_formatted(directory):
        raise Rejected(
            f"--data-dir {directory}: no Stele volume is there; check the path", code=Code.NOT_FOUND
        )
    return read_record(directory).refused


def take_back(directory: Path, now: str) -> None:
    """Allow a volume to be used again that the masters refused. Its next starts ask the masters to accept
    that its log ends too early. `now`: the time as text, for the record.

    Raises:
        Fate: Usage, a process uses it.
        Rejected: as `refusal_of`, or the masters did not refuse the volume. Corrupt: as `refusal_of`.
    """
    why = refusal_of(directory)
    if not why:
        raise Rejected(f"{directory} was not refused; there is nothing to take back")
    fd = lock_directory(directory)
    try:
        record = read_record(directory)
        taken_back = (*record.taken_back, f"{now}: {why}")
        write_record(directory, replace(record, refused="", accepting=True, taken_back=taken_back))
    finally:
        os.close(fd)


def volume_empty(directory: Path, why: str) -> Fate:
    """The fate of a volume that is empty and may not be formatted. `why`: a clause."""
    return Fate("VolumeEmpty", EXIT_VOLUME_EMPTY, f"{directory} is empty, and {why}")


def volume_old(directory: Path, why: str) -> Fate:
    """The fate of a volume that lacks what its node acknowledged. `why`: a clause."""
    return Fate(
        "VolumeOld",
        EXIT_VOLUME_OLD,
        f"{directory} is an older copy of this node's volume: {why}; it may lack votes and acknowledged "
        "rows, so it is not used again; attach the newest one, or start a new node on an empty volume. If "
        f"this is the newest that is left, run `stele local take-back --data-dir {directory}`",
    )

"""The key space state machine: keys and values, atomic batches, commit listeners. The catalog lives in one. Called by
stele.consensus and stele.master; all in memory, flushed as one checked file that is replaced whole.

Invariant: a key's listeners have returned before the next change of that key is applied.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import xxhash

from stele.model import writeop
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OpId
from stele.model.kvop import KeyOp, KeyOperation, decode_operations
from stele.model.writeop import BodyKind
from stele.tablet import exactly_once
from stele.tablet.checked import read_sealed, seal
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES, Files, translate
from stele.tablet.machine import Checkpoint, Outcome
from stele.tablet.progress import Progress

FILE_NAME = "keyspace"
_MAGIC = b"STLKEYSP"
_VERSION = 1
_PAIR = struct.Struct("<IIQ")
_LENGTH = struct.Struct("<I")

CommitListener = Callable[[bytes, bytes | None, bytes | None, OpId], None]
"""Called with (key, old value, new value, OpId of the entry); None stands for absent."""

_log = structlog.get_logger("stele.tablet.keyspace")


class KeySpaceFlush:
    """Writes one whole copy of the key space."""

    def __init__(self, store: KeySpace) -> None:
        self.opid = store.applied
        self.failed = False
        self._store = store
        self._ceiling = store.max_ceiling
        self._timestamp = store._progress.last_timestamp
        self._pairs = dict(store._pairs)
        self._once = store._once.frozen()

    def write(self) -> None:
        """See FlushJob."""
        try:
            self._write(self._store)
        except BaseException:
            self.failed = True
            raise

    def _write(self, store: KeySpace) -> None:
        head = json.dumps(
            {
                "term": self.opid.term,
                "index": self.opid.index,
                "ceiling": self._ceiling,
                "timestamp": self._timestamp,
            }
        ).encode()
        once = exactly_once.encode(self._once)
        parts = [_LENGTH.pack(len(head)), head, _LENGTH.pack(len(once)), once]
        for key, (value, index) in self._pairs.items():
            parts.append(_PAIR.pack(len(key), len(value), index) + key + value)
        temporary = store.directory / (FILE_NAME + ".tmp")
        with store._file_lock:
            store._files.write_new(temporary, [seal(_MAGIC, _VERSION, b"".join(parts))])
            store._files.replace(temporary, store.directory / FILE_NAME)
            store._on_disk = self.opid


class KeySpace:
    """Keys and values of one tablet. All but `checkpoint` and `verify` belongs to the owner's thread."""

    def __init__(
        self, directory: Path, files: Files, flush_bytes: int, once: ExactlyOnce, progress: Progress
    ) -> None:
        self.directory = directory
        self._files = files
        self._flush_bytes = flush_bytes
        self._once = once
        self._progress = progress
        self._flushed = progress.applied
        self._on_disk = progress.applied
        self._pairs: dict[bytes, tuple[bytes, int]] = {}
        self._sorted: list[bytes] = []
        self._listeners: list[CommitListener] = []
        self._pending: dict[bytes, int] = {}
        self._pending_inserts: dict[int, tuple[bytes, ...]] = {}
        self._next_token = 1
        self._job: KeySpaceFlush | None = None
        self._unflushed_bytes = 0
        self._file_lock = threading.Lock()

    @staticmethod
    def create(directory: Path, *, files: Files = FILES, flush_bytes: int = 4 << 20) -> KeySpace:
        """A new, empty key space in `directory` (made if absent), synced, but not the name of `directory`.

        Raises:
            Rejected: ALREADY_PRESENT, there is one.
            Retryable: DISK_FULL.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / FILE_NAME).exists():
            raise Rejected(f"key space in {directory.name}: there is one already", code=Code.ALREADY_PRESENT)
        store = KeySpace(directory, files, flush_bytes, ExactlyOnce(), Progress())
        KeySpaceFlush(store).write()
        return store

    @staticmethod
    def open(directory: Path, *, files: Files = FILES, flush_bytes: int = 4 << 20) -> KeySpace:
        """The key space as last flushed; the owner then applies the entries after `flushed`.

        Raises:
            Corrupt: missing or damaged.
            Rejected: UNSUPPORTED_VERSION.
        """
        body = read_sealed(directory / FILE_NAME, _MAGIC, _VERSION)
        files.remove(directory / (FILE_NAME + ".tmp"))
        try:
            (length,) = _LENGTH.unpack_from(body)
            head = json.loads(body[4 : 4 + length])
            at = 4 + length
            (length,) = _LENGTH.unpack_from(body, at)
            once = ExactlyOnce.decode(body[at + 4 : at + 4 + length])
            at += 4 + length
            applied = OpId(int(head["term"]), int(head["index"]))
            store = KeySpace(
                directory,
                files,
                flush_bytes,
                once,
                Progress(applied, int(head["ceiling"]), int(head["timestamp"])),
            )
            while at < len(body):
                key_length, value_length, index = _PAIR.unpack_from(body, at)
                at += _PAIR.size
                key = body[at : at + key_length]
                store._pairs[key] = (body[at + key_length : at + key_length + value_length], index)
                at += key_length + value_length
        except (ValueError, TypeError, KeyError, struct.error) as exc:
            raise Corrupt(f"{FILE_NAME}: {exc!r}; expected what a flush wrote") from exc
        store._sorted = sorted(store._pairs)
        return store

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def applied(self) -> OpId:
        """See StateMachine."""
        return self._progress.applied

    @property
    def flushed(self) -> OpId:
        """See StateMachine."""
        return self._flushed

    @property
    def max_ceiling(self) -> int:
        """See StateMachine."""
        return self._progress.max_ceiling

    @property
    def clients_idle_us(self) -> int | None:
        """See StateMachine."""
        return self._once.idle_us

    @property
    def memory_bytes(self) -> int:
        """See StateMachine. All pairs stay in memory."""
        return 0

    @property
    def last_timestamp(self) -> int:
        """Hybrid time of the newest applied write."""
        return self._progress.last_timestamp

    def read(self, key: bytes) -> bytes | None:
        """The value, None if absent."""
        found = self._pairs.get(key)
        return None if found is None else found[0]

    def changed_at(self, key: bytes) -> int:
        """Log index of the entry that last set the key; 0 if absent."""
        found = self._pairs.get(key)
        return 0 if found is None else found[1]

    def list(
        self, prefix: bytes = b"", *, after: bytes = b"", limit: int | None = None
    ) -> Sequence[tuple[bytes, bytes]]:
        """(key, value) of the keys that begin with `prefix` and are above `after`, ascending."""
        keys = itertools.takewhile(lambda key: key.startswith(prefix), self._keys_from(max(prefix, after)))
        wanted = (key for key in keys if key > after or not after)
        return [(key, self._pairs[key][0]) for key in itertools.islice(wanted, limit)]

    def _keys_from(self, start: bytes) -> Iterator[bytes]:
        for at in range(bisect.bisect_left(self._sorted, start), len(self._sorted)):
            yield self._sorted[at]

    def __len__(self) -> int:
        return len(self._pairs)

    def checksum(self) -> int:
        """64 bits over keys, values and exactly-once state; equal on replicas that applied the same entries."""
        total = self._once.checksum()
        for key, (value, index) in self._pairs.items():
            packed = _PAIR.pack(len(key), len(value), index) + key + value
            total = (total + xxhash.xxh3_64_intdigest(packed)) & ((1 << 64) - 1)
        return total

    # --- before proposing ------------------------------------------------------------------------------------------

    def begin_pending(self, operations: Sequence[KeyOperation]) -> int:
        """Claim the keys of a batch that is about to be proposed; returns a token for `end_pending`.

        Raises:
            Rejected: CHANGE_IN_PROGRESS, another batch that is not yet applied changes one of the keys;
                ALREADY_PRESENT, an insert of a key that is present.
        """
        written = [o.key for o in operations if o.op is not KeyOp.CHECK]
        for operation in operations:
            if operation.key in self._pending:
                raise Rejected(
                    f"key {_shown(operation.key)}: another change of it is under way; try again when it is done",
                    code=Code.CHANGE_IN_PROGRESS,
                )
            if operation.op is KeyOp.INSERT and operation.key in self._pairs:
                raise Rejected(f"key {_shown(operation.key)} is present", code=Code.ALREADY_PRESENT)
        token = self._next_token
        self._next_token += 1
        for key in written:
            self._pending[key] = token
        self._pending_inserts[token] = tuple(written)
        return token

    def end_pending(self, token: int) -> None:
        """The batch is applied, or known never to be."""
        for key in self._pending_inserts.pop(token, ()):
            self._pending.pop(key, None)

    def add_commit_listener(self, listener: CommitListener) -> None:
        """Call `listener` for each key that a committed batch changes, in the batch's order, from `apply`."""
        self._listeners.append(listener)

    # --- applying --------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> Outcome:
        """See StateMachine. The outcome's `value` is the present value where INSERT, CAS, CHECK or DELETE found it to
        be in the way."""
        self._progress.advance(entry)
        if entry.kind is not EntryKind.WRITE:
            if entry.kind is EntryKind.CEILING:
                self._once.expire(entry.timestamp)
            return Outcome()
        header, body = writeop.decode(entry.payload)
        if header.kind is not BodyKind.KEYSPACE:
            raise Corrupt(
                f"entry {entry.opid}: body kind {header.kind.name} in a key space; expected KEYSPACE"
            )
        self._unflushed_bytes += len(entry.payload)
        earlier = self._once.earlier(header, entry.timestamp)
        if earlier is not None:
            return earlier
        try:
            operations = decode_operations(body)
        except (Rejected, Corrupt) as exc:
            raise writeop.not_understood(header, body, exc) from exc
        outcome = self._check(operations, entry)
        if outcome.code is Code.OK:
            self._commit(operations, entry.opid)
        self._once.record(header, outcome)
        return outcome

    def _check(self, operations: Sequence[KeyOperation], entry: Entry) -> Outcome:
        """Messages are replicated state with the outcome, and in the checksum: their words must stay."""
        for operation in operations:
            present = self.read(operation.key)
            if operation.op is KeyOp.INSERT and present is not None:
                return Outcome(
                    entry.timestamp,
                    value=present,
                    code=Code.ALREADY_PRESENT,
                    message=f"key {operation.key!r} is present",
                )
            asks = operation.op in (KeyOp.CAS, KeyOp.CHECK) or (
                operation.op is KeyOp.DELETE and operation.expected is not None
            )
            if asks and present != operation.expected:
                return Outcome(
                    entry.timestamp,
                    value=present,
                    code=Code.CAS_FAILED,
                    message=f"key {operation.key!r} is not what was expected; read it again",
                )
        return Outcome(entry.timestamp)

    def _commit(self, operations: Sequence[KeyOperation], opid: OpId) -> None:
        changes: list[tuple[bytes, bytes | None, bytes | None]] = []
        for operation in operations:
            key = operation.key
            if operation.op is KeyOp.CHECK:
                continue
            old = self._pairs.get(key)
            if operation.op is KeyOp.DELETE:
                if old is None:
                    continue
                del self._pairs[key]
                del self._sorted[bisect.bisect_left(self._sorted, key)]
                changes.append((key, old[0], None))
                continue
            if old is None:
                bisect.insort(self._sorted, key)
            self._pairs[key] = (operation.value, opid.index)
            changes.append((key, None if old is None else old[0], operation.value))
        for change in changes:
            for listener in self._listeners:
                listener(*change, opid)

    # --- flushing --------------------------------------------------------------------------------------------------

    def should_flush(self) -> bool:
        """See StateMachine."""
        if self._job is not None:
            return self._job.failed
        return self._unflushed_bytes >= self._flush_bytes

    def begin_flush(self) -> KeySpaceFlush | None:
        """See StateMachine."""
        if (self._job is not None and not self._job.failed) or self.applied == self._flushed:
            return None
        self._job = KeySpaceFlush(self)
        self._unflushed_bytes = 0
        return self._job

    def finish_flush(self, job: Any) -> None:
        """See StateMachine."""
        if self._job is not None and job is self._job:
            self._flushed = self._job.opid
            self._job = None
            _log.debug("key space flushed", opid=str(self._flushed), keys=len(self._pairs))

    def checkpoint(self, directory: Path) -> Checkpoint:
        """See StateMachine."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise translate(exc, f"making {directory.name}") from exc
        if any(directory.iterdir()):
            raise Rejected(f"checkpoint: {directory.name} is not empty", code=Code.ALREADY_PRESENT)
        with self._file_lock:
            self._files.link(self.directory / FILE_NAME, directory / FILE_NAME)
            opid = self._on_disk
        self._files.sync_directory(directory)
        return Checkpoint(opid, (FILE_NAME,))

    def verify(self, read: Callable[[int], None] = lambda size: None, compared: Collection[str] = ()) -> None:
        """See StateMachine."""
        with self._file_lock:
            read(len(read_sealed(self.directory / FILE_NAME, _MAGIC, _VERSION)))

    def close(self) -> None:
        """See StateMachine."""
        self._pairs = {}
        self._sorted = []


def _shown(key: bytes) -> str:
    """A key as its caller wrote it, mostly as text."""
    return repr(key.decode("utf-8", "backslashreplace"))

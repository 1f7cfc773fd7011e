"""The key space state machine: keys and values, atomic batches, commit listeners. The catalog lives in one.

Called by stele.consensus and stele.master. All pairs are in memory (pairs.py) and are flushed as one checked
file. A batch that would exceed BYTES_MAX is refused before it is proposed. What is in the log is applied
whatever its size, so that all replicas and all restarts reach the same state.

Invariant: a key's listeners have returned before the next change of that key is applied.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import structlog

from stele.model import writeop
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OpId
from stele.model.kvop import LEASE_OPS, KeyOp, KeyOperation, decode_operations, lease_of, ttl_of
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet import keyfile
from stele.tablet.claims import Claims
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.files import FILES, Files, translate
from stele.tablet.keyfile import FILE_NAME
from stele.tablet.leases import LEASE_KEYS_MAX, LEASES_MAX, Leases
from stele.tablet.machine import Checkpoint, FlushJob, Found, Lookup, Outcome
from stele.tablet.pairs import Pairs
from stele.tablet.progress import Progress
from stele.tablet.recent import Change, Recent

BYTES_MAX = 64 << 20
"""The most bytes of keys and values, plus 256 for each key. All of it is in memory, and each flush writes all
of it."""

_REWRITES_MAX = 4
"""Flushes write at most this many bytes for each byte that came in, if writes never stop."""

_SUMS_MAX = 64
"""The most sums of earlier states. A leader commits some ceilings a second while clients write, so this many reach
back for seconds."""

StateSum = tuple[int, int, int]
"""(log index, keys, 64 bits over keys, values and leases) of a state."""

CommitListener = Callable[[bytes, bytes | None, bytes | None, OpId], None]
"""Called with (key, old value, new value, OpId of the entry). None means that the key is absent."""

_log = structlog.get_logger("stele.tablet.keyspace")


class KeySpaceFlush:
    """Writes a whole copy of the key space."""

    def __init__(self, store: KeySpace) -> None:
        self.opid = store.applied
        self.failed = False
        self._store = store
        self._ceiling = store.max_ceiling
        self._timestamp = store._progress.last_timestamp
        self._once = store._once.frozen()
        self._leases = dict(store.leases.ttl_ms)
        self.pairs = store._pairs.freeze()

    def write(self) -> None:
        """See FlushJob."""
        try:
            self._write(self._store)
        except BaseException:
            self.failed = True
            raise

    def _write(self, store: KeySpace) -> None:
        parts = keyfile.parts(self.opid, self._ceiling, self._timestamp, self._once, self.pairs, self._leases)
        temporary = store.directory / (FILE_NAME + ".tmp")
        with store._file_lock:
            store._files.write_new(temporary, parts)
            store._files.replace(temporary, store.directory / FILE_NAME)
            store._on_disk = self.opid


class KeySpace:
    """Keys and values of one tablet. Only the owner's thread may call, except `checkpoint` and `verify`."""

    def __init__(
        self,
        directory: Path,
        files: Files,
        flush_bytes: int,
        bytes_max: int,
        once: ExactlyOnce,
        progress: Progress,
        pairs: Pairs,
        leases: Leases,
    ) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self._files = files
        self._flush_bytes = flush_bytes
        self._once = once
        self._progress = progress
        self._flushed = progress.applied
        self._on_disk = progress.applied
        self._pairs = pairs
        self.leases = leases
        self.recent = Recent(progress.applied.index)
        self._listeners: list[CommitListener] = []
        self._claims = Claims(pairs)
        self._job: KeySpaceFlush | None = None
        self._unflushed_bytes = 0
        self._file_lock = threading.Lock()
        self._sums: deque[StateSum] = deque(maxlen=_SUMS_MAX)
        """The sums as of the last ceilings, the oldest first."""

    @staticmethod
    def create(
        directory: Path, *, files: Files = FILES, flush_bytes: int = 4 << 20, bytes_max: int = BYTES_MAX
    ) -> KeySpace:
        """Create an empty key space in `directory`, which is made if absent. Syncs all but the directory's
        own name.

        Raises:
            Rejected: ALREADY_PRESENT: there is one already.
            Retryable: DISK_FULL.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / FILE_NAME).exists():
            raise Rejected(f"{directory.name} already holds a key space", code=Code.ALREADY_PRESENT)
        store = KeySpace(
            directory, files, flush_bytes, bytes_max, ExactlyOnce(), Progress(), Pairs(), Leases()
        )
        KeySpaceFlush(store).write()
        store._pairs.thaw()
        return store

    @staticmethod
    def open(
        directory: Path, *, files: Files = FILES, flush_bytes: int = 4 << 20, bytes_max: int = BYTES_MAX
    ) -> KeySpace:
        """Open the key space as last flushed. The owner then applies the entries after `flushed`.

        Raises:
            Corrupt: the file is missing or damaged.
            Rejected: UNSUPPORTED_VERSION.
        """
        progress, once, pairs, leases = keyfile.read(directory / FILE_NAME)
        files.remove(directory / (FILE_NAME + ".tmp"))
        return KeySpace(directory, files, flush_bytes, bytes_max, once, progress, pairs, leases)

    # --- reading

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

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """See StateMachine."""
        self._once.admit(header, wall_us, clock_error_us)

    def expect(self, header: WriteHeader) -> None:
        """See StateMachine."""
        self._once.expect(header.client_id)

    def stop_expecting(self, header: WriteHeader) -> None:
        """See StateMachine."""
        self._once.stop_expecting(header.client_id)

    def knows_client(self, client_id: bytes) -> bool:
        """See StateMachine."""
        return self._once.knows_client(client_id)

    @property
    def memory_bytes(self) -> int:
        """See StateMachine. All pairs stay in memory."""
        return 0

    @property
    def rewritten_bytes(self) -> int:
        """See StateMachine. Each flush writes all pairs."""
        return self._pairs.bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the present keys and values count, against `bytes_max`."""
        return self._pairs.bytes

    @property
    def last_timestamp(self) -> int:
        """Hybrid time of the newest applied write."""
        return self._progress.last_timestamp

    @property
    def revision(self) -> int:
        """The log index up to which changes are applied: the same state on all replicas. It rises, with gaps."""
        return self._progress.applied.index

    def read(self, key: bytes) -> bytes | None:
        """The value of a key; None if absent."""
        found = self._pairs.get(key)
        return None if found is None else found[0]

    def changed_at(self, key: bytes) -> int:
        """Log index of the entry that last set the key; 0 if absent."""
        found = self._pairs.get(key)
        return 0 if found is None else found[1]

    def lease_of(self, key: bytes) -> int:
        """The lease that the key ends with; 0 for none."""
        found = self._pairs.get(key)
        return 0 if found is None else found[2]

    def list(
        self, prefix: bytes = b"", *, after: bytes = b"", limit: int | None = None
    ) -> Sequence[tuple[bytes, bytes]]:
        """(key, value) of the keys that begin with `prefix` and are above `after`, ascending."""
        keys = itertools.takewhile(
            lambda key: key.startswith(prefix), self._pairs.keys_from(max(prefix, after))
        )
        wanted = (key for key in keys if key > after or not after)
        found = ((key, self._pairs.get(key)) for key in itertools.islice(wanted, limit))
        return [(key, pair[0]) for key, pair in found if pair is not None]

    def __len__(self) -> int:
        return len(self._pairs)

    def checksum(self) -> int:
        """64 bits over keys, values, leases and exactly-once state. Equal on replicas that applied the same
        entries."""
        return (self._once.checksum() + self._pairs.checksum + self.leases.checksum) & ((1 << 64) - 1)

    def _sum(self) -> StateSum:
        both = self._pairs.checksum + self.leases.checksum
        return self.revision, len(self._pairs), both & ((1 << 64) - 1)

    @property
    def sums(self) -> Sequence[StateSum]:
        """The sums of this state, and of those at the last ceilings, by rising log index.

        Ceilings are entries of the log, so all replicas take sums at the same log indexes. Replicas that are asked one after
        the other can therefore be compared while clients write. The exactly-once state is left out, because its sum takes
        long.
        """
        now = self._sum()
        return [*(each for each in self._sums if each[0] < now[0]), now]

    # --- before proposing

    def check_operations(self, operations: Sequence[KeyOperation], header: WriteHeader | None = None) -> int:
        """Check a batch before it is proposed. Returns by how many bytes the key space grows with it.

        Raises:
            Rejected: TOO_LARGE: with all pending batches the key space would exceed `bytes_max`. A batch that
                adds nothing passes. A retry of a remembered write passes too, because it gets the same outcome.
        """
        if header is not None and self._once.knows(header):
            return 0
        return self._claims.growth_of(operations, self.bytes_max)

    def begin_pending(self, operations: Sequence[KeyOperation]) -> int:
        """Claim the keys of a batch that is about to be proposed. Returns a token for `reserve` and
        `end_pending`. Raises what `Claims.begin` raises."""
        return self._claims.begin(operations)

    def reserve(
        self, token: int, operations: Sequence[KeyOperation], header: WriteHeader | None = None
    ) -> None:
        """Count the bytes that a batch adds, until `end_pending`.

        Raises:
            Rejected: see `check_operations`.
        """
        self._claims.reserve(token, self.check_operations(operations, header))

    def end_pending(self, token: int) -> None:
        """Free the keys and bytes that `begin_pending` and `reserve` set aside for a batch. Call it once the
        batch was applied, or certainly never will be."""
        self._claims.end(token)

    def add_commit_listener(self, listener: CommitListener) -> None:
        """Call `listener` from `apply` for each key that a committed batch changes, in the batch's order."""
        self._listeners.append(listener)

    # --- applying

    def foreseen(self, payload: bytes, timestamp: int) -> Outcome | None:
        """See StateMachine. Always None: the outcome depends on conditions and leases when the entry is applied."""
        return None

    def begin(self, entry: Entry, found: Found | None = None) -> Outcome | Lookup:
        """See StateMachine. Applies at once, because nothing here takes long."""
        return self.apply(entry)

    def apply(self, entry: Entry) -> Outcome:
        """See StateMachine. If INSERT, CAS, CHECK or DELETE is refused, the outcome's `value` is the key's
        present value."""
        self._progress.advance(entry)
        if entry.kind is not EntryKind.WRITE:
            if entry.kind is EntryKind.CEILING:
                self._once.expire(entry.timestamp)
                self._sums.append(self._sum())
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
            self._commit(operations, entry)
        self._once.record(header, outcome)
        return outcome

    def _check(self, operations: Sequence[KeyOperation], entry: Entry) -> Outcome:
        """The outcome of a batch: OK, or why it is refused. The messages are replicated state and part of the checksum,
        so their words must never change."""
        attached: Counter[int] = Counter()
        for operation in operations:
            if operation.op in LEASE_OPS or operation.lease:
                refused = self._check_lease(operation, attached, entry)
                if refused is not None:
                    return refused
                if operation.op in LEASE_OPS:
                    continue
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

    def _check_lease(self, operation: KeyOperation, attached: Counter[int], entry: Entry) -> Outcome | None:
        """Why a lease cannot be granted, or a key not be attached to one; None if it can. The words must never change.

        `attached`: how many keys of the same write are new to each lease."""
        leases = self.leases
        if operation.op is KeyOp.REVOKE:
            return None  # also if it is gone
        if operation.op is KeyOp.GRANT:
            lease, _ = lease_of(operation), ttl_of(operation)
            if lease in leases:
                return Outcome(
                    entry.timestamp, code=Code.ALREADY_PRESENT, message=f"lease {lease:016x} is present"
                )
            if len(leases) >= LEASES_MAX:
                return Outcome(
                    entry.timestamp,
                    code=Code.TOO_LARGE,
                    message=f"the key space has {LEASES_MAX} leases; revoke some",
                )
            return None
        lease, held = operation.lease, leases.keys_of(operation.lease)
        if lease not in leases:
            return Outcome(
                entry.timestamp,
                code=Code.LEASE_LOST,
                message=f"lease {lease:016x} has expired, or was revoked; take another",
            )
        attached[lease] += operation.key not in held
        if len(held) + attached[lease] > LEASE_KEYS_MAX:
            return Outcome(
                entry.timestamp,
                code=Code.TOO_LARGE,
                message=f"lease {lease:016x} has {LEASE_KEYS_MAX} keys; take another lease for more",
            )
        return None

    def _commit(self, operations: Sequence[KeyOperation], entry: Entry) -> None:
        opid = entry.opid
        changes: list[tuple[bytes, bytes | None, bytes | None]] = []
        for operation in operations:
            key = operation.key
            if operation.op is KeyOp.CHECK:
                continue
            if operation.op is KeyOp.GRANT:
                self.leases.grant(lease_of(operation), ttl_of(operation))
                continue
            if operation.op is KeyOp.REVOKE:
                for held in self.leases.end(lease_of(operation)):
                    old = self._pairs.remove(held)
                    if old is not None:
                        changes.append((held, old[0], None))
                continue
            if operation.op is KeyOp.DELETE:
                old = self._pairs.remove(key)
                if old is not None:
                    self.leases.move(key, old[2], 0)
                    changes.append((key, old[0], None))
                continue
            old = self._pairs.put(key, (operation.value, opid.index, operation.lease))
            self.leases.move(key, 0 if old is None else old[2], operation.lease)
            changes.append((key, None if old is None else old[0], operation.value))
        for change in changes:
            for listener in self._listeners:
                listener(*change, opid)
        new: list[Change] = [(key, value) for key, _, value in changes]
        self.recent.add(opid.index, entry.timestamp, new)

    # --- flushing

    def should_flush(self) -> bool:
        """See StateMachine."""
        if self._job is not None:
            return self._job.failed
        return self._unflushed_bytes >= max(self._flush_bytes, self.rewritten_bytes // _REWRITES_MAX)

    def begin_flush(self) -> KeySpaceFlush | None:
        """See StateMachine."""
        if (self._job is not None and not self._job.failed) or self.applied == self._flushed:
            return None
        self._job = KeySpaceFlush(self)
        self._unflushed_bytes = 0
        return self._job

    def finish_flush(self, job: FlushJob) -> None:
        """See StateMachine."""
        if self._job is not None and job is self._job:
            self._flushed = self._job.opid
            self._job = None
            self._pairs.thaw()
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
        keyfile.verify(self.directory / FILE_NAME, read)

    def close(self) -> None:
        """See StateMachine."""
        self._pairs = Pairs()
        self._claims = Claims(self._pairs)

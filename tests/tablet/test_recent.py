"""The newest changes of a key space: what is kept, from where on, and that it is the same after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stele.model.entry import Entry, EntryKind
from stele.model.kvop import KeyOp, KeyOperation, encode_operations
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader, digest, encode
from stele.tablet.keyspace import KeySpace
from stele.tablet.recent import Recent


class Reads:
    """Who reads the changes: it hears of each, and has read up to `read_to`."""

    def __init__(self, written: Callable[[], None]) -> None:
        self.written = written
        self.read_to = 0


def entry(index: int, *operations: KeyOperation, client: bytes = NO_CLIENT, sequence: int = 0) -> Entry:
    body = encode_operations(operations)
    header = WriteHeader(client, sequence, 0, 1, digest(body), kind=BodyKind.KEYSPACE)
    return Entry(1, index, EntryKind.WRITE, index << 12, encode(header, body))


def put(key: bytes, value: bytes = b"v") -> KeyOperation:
    return KeyOperation(KeyOp.REPLACE, key, value)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5), st.integers(300, 2_000))
def test_everything_behind_the_start_is_there_once_and_in_order(
    sizes: list[int], writes_max: int, bytes_max: int
) -> None:
    recent, twin = Recent(10, writes_max=writes_max, bytes_max=bytes_max), list[tuple[int, int]]()
    for n, size in enumerate(sizes):
        revision = 11 + 2 * n
        recent.add(revision, revision << 12, [(bytes([i]), b"v") for i in range(size)])
        if size:
            twin.append((revision, size))
        kept = [(w.revision, len(w.changes)) for w in recent.after(recent.start)]
        assert kept == [each for each in twin if each[0] > recent.start]
        assert not twin or kept, "the newest write is there whatever its size"
        assert len(kept) <= writes_max
        for after in range(recent.start, revision + 2):
            assert [w.revision for w in recent.after(after)] == [r for r, _ in twin if r > after]
    assert recent.start == 10 or (recent.start, dict(twin)[recent.start]) in twin


def test_what_is_not_read_yet_is_kept_whatever_the_bounds() -> None:
    """A large write that is applied in the same slice pushed a small one out, before it was pushed to those who watch it."""
    recent = Recent(0, bytes_max=1_000)
    recent.reader = reader = Reads(lambda: None)
    recent.add(1, 1, [(b"x", b"new")])
    recent.add(2, 2, [(b"big", bytes(5_000))])
    assert (recent.start, [w.revision for w in recent.after(0)]) == (0, [1, 2])
    reader.read_to = 1
    recent.trim()
    assert (recent.start, [w.revision for w in recent.after(1)]) == (1, [2])
    recent.add(3, 3, [(b"y", b"")])
    assert recent.start == 1, "write 2 is not read"
    recent.reader = None
    recent.trim()
    assert (recent.start, [w.revision for w in recent.after(2)]) == (2, [3])


def test_a_write_has_all_its_changes_and_its_revision(tmp_path: Path) -> None:
    space = KeySpace.create(tmp_path / "k")
    told: list[int] = []
    space.recent.reader = Reads(lambda: told.append(space.revision))
    client = bytes([7]) * 16
    space.apply(entry(1, put(b"a"), put(b"b"), client=client))
    space.apply(entry(2, KeyOperation(KeyOp.DELETE, b"absent")))
    space.apply(entry(3, KeyOperation(KeyOp.CHECK, b"a", expected=b"other"), put(b"c")))
    space.apply(entry(4, KeyOperation(KeyOp.DELETE, b"a")))
    found = [(w.revision, list(w.changes)) for w in space.recent.after(0)]
    assert found == [(1, [(b"a", b"v"), (b"b", b"v")]), (4, [(b"a", None)])]
    assert told == [1, 4], "what changes nothing is told to nobody"
    again = space.apply(entry(5, put(b"a"), put(b"b"), client=client))
    assert again.duplicate and space.recent.revision_at(again.timestamp) == 1, (
        "a retry has its write's revision"
    )
    assert space.recent.revision_at(3 << 12) == 0, "it was refused"


def test_a_replica_that_starts_keeps_what_it_applies_from_its_last_flush_on(tmp_path: Path) -> None:
    space = KeySpace.create(tmp_path / "k")
    space.apply(entry(1, put(b"a")))
    job = space.begin_flush()
    assert job is not None
    job.write()
    space.finish_flush(job)
    again = KeySpace.open(tmp_path / "k")
    for each in (space, again):
        each.apply(entry(2, put(b"b")))
    assert (again.revision, again.recent.start) == (space.revision, 1) == (2, 1)
    assert again.changed_at(b"a") == 1, "revisions are the same on all replicas and after a restart"
    assert [w.revision for w in again.recent.after(1)] == [2]
    assert [w.revision for w in space.recent.after(0)] == [1, 2]

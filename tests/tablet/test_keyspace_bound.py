"""How large a key space may become, and that none of its steps on the event loop goes through all of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from stele.model import writeop
from stele.model.errors import Code, Rejected
from stele.model.kvop import KeyOp, KeyOperation
from stele.tablet.checked import PIECE_BYTES
from stele.tablet.files import Files
from stele.tablet.keyfile import FILE_NAME, _gathered
from stele.tablet.keyspace import KeySpace
from stele.tablet.pairs import PAIR_BYTES
from tests.tablet.test_keyspace import entry_of, replace_entry

BYTES_MAX = 10 * (PAIR_BYTES + 100)


def _replace(key: bytes, length: int) -> KeyOperation:
    return KeyOperation(KeyOp.REPLACE, key, b"v" * (length - len(key)))


def _full(home: Path) -> KeySpace:
    store = KeySpace.create(home, bytes_max=BYTES_MAX)
    for index in range(1, 11):
        operation = _replace(b"%02d" % index, 100)
        assert store.check_operations([operation]) == PAIR_BYTES + 100
        store.apply(entry_of(index, [operation]))
    assert store.held_bytes == BYTES_MAX
    return store


def _refused(store: KeySpace, *operations: KeyOperation) -> None:
    with pytest.raises(Rejected) as caught:
        store.check_operations(operations)
    assert caught.value.code is Code.TOO_LARGE


def test_what_would_be_too_much_is_refused_before_it_is_proposed(tmp_path: Path) -> None:
    store = _full(tmp_path / "k")
    _refused(store, _replace(b"new", 3))
    _refused(store, KeyOperation(KeyOp.INSERT, b"new"))
    _refused(store, KeyOperation(KeyOp.CAS, b"new", b"", None))
    _refused(store, _replace(b"01", 101))
    for operations in (
        [_replace(b"01", 100)],
        [_replace(b"01", 50)],
        [KeyOperation(KeyOp.INSERT, b"01", b"v" * 1_000)],  # it is there: nothing will come of it
        [KeyOperation(KeyOp.CHECK, b"01", b"", b"v")],
        [KeyOperation(KeyOp.DELETE, b"01")],
        [KeyOperation(KeyOp.DELETE, b"none")],
        [KeyOperation(KeyOp.DELETE, b"01"), _replace(b"new", 100)],
    ):
        assert store.check_operations(operations) == 0
    store.apply(entry_of(11, [KeyOperation(KeyOp.DELETE, b"01")]))
    assert store.check_operations([_replace(b"new", 100)]) == PAIR_BYTES + 100
    _refused(store, _replace(b"new", 101))


def test_what_is_under_way_counts(tmp_path: Path) -> None:
    """Many are proposed before the first of them is applied."""
    store = _full(tmp_path / "k")
    store.apply(entry_of(11, [KeyOperation(KeyOp.DELETE, b"01"), KeyOperation(KeyOp.DELETE, b"02")]))
    first = store.begin_pending([_replace(b"a", 100)])
    store.reserve(first, [_replace(b"a", 100)])
    second = store.begin_pending([])
    insert = KeyOperation(KeyOp.INSERT, b"b", b"v" * 99)
    store.reserve(second, [insert])
    _refused(store, _replace(b"c", 1))
    assert store.check_operations([KeyOperation(KeyOp.DELETE, b"03")]) == 0
    _refused(
        store, KeyOperation(KeyOp.INSERT, b"b", b"v" * 99)
    )  # the first may come to nothing, and this be done
    store.end_pending(second)  # it was never proposed
    assert (
        store.check_operations([_replace(b"c", 100)]) == store.check_operations([insert]) == PAIR_BYTES + 100
    )
    store.apply(entry_of(12, [_replace(b"a", 100)]))
    store.end_pending(first)
    store.end_pending(first)
    assert store.check_operations([_replace(b"c", 100)]) == PAIR_BYTES + 100
    _refused(store, _replace(b"c", 101))
    claim = store.begin_pending([KeyOperation(KeyOp.DELETE, b"03")])
    _refused(store, KeyOperation(KeyOp.INSERT, b"03", b"v" * 100))  # it may be gone by then
    store.end_pending(claim)
    with pytest.raises(Rejected):
        store.reserve(store.begin_pending([_replace(b"c", 101)]), [_replace(b"c", 101)])
    assert store.check_operations([_replace(b"d", 100)]) == PAIR_BYTES + 100


def test_a_write_that_was_done_is_not_refused_when_it_is_sent_again(tmp_path: Path) -> None:
    """It would be told that nothing was done."""
    store = _full(tmp_path / "k")
    again = [_replace(b"01", 100)]
    entry = entry_of(11, again, client_id=b"c" * 16, sequence=1)
    header, _ = writeop.decode(entry.payload)
    store.apply(entry)
    store.apply(entry_of(12, [_replace(b"01", 50), _replace(b"02", 150)]))
    _refused(store, *again)
    assert store.check_operations(again, header) == 0


def test_what_the_log_holds_is_applied_by_all_alike(tmp_path: Path) -> None:
    """A leader of an earlier program knows no bound, and a replica applies the same entries again after a restart."""
    small = KeySpace.create(tmp_path / "small", bytes_max=1)
    large = KeySpace.create(tmp_path / "large")
    for index in range(1, 5):
        entry = replace_entry(index, b"%d" % index, b"v")
        assert small.apply(entry) == large.apply(entry)
    assert small.checksum() == large.checksum() and small.list() == large.list()
    job = small.begin_flush()
    assert job is not None
    job.write()
    again = KeySpace.open(tmp_path / "small", bytes_max=1)
    assert again.checksum() == large.checksum() and again.held_bytes == large.held_bytes > 1
    _refused(again, _replace(b"5", 1))
    assert again.check_operations([KeyOperation(KeyOp.DELETE, b"1")]) == 0


def test_sizes_and_checksum_are_those_of_the_pairs_that_are_there(tmp_path: Path) -> None:
    """They are kept up to date with each change, also while a flush is under way, and once it has failed."""
    rng = random.Random(1)
    store = KeySpace.create(tmp_path / "k")
    twin: dict[bytes, tuple[bytes, int]] = {}
    job = None
    for index in range(1, 600):
        key = b"%d" % rng.randrange(20)
        if rng.random() < 0.3:
            store.apply(entry_of(index, [KeyOperation(KeyOp.DELETE, key)]))
            twin.pop(key, None)
        else:
            value = rng.randbytes(rng.randrange(40))
            store.apply(replace_entry(index, key, value))
            twin[key] = (value, index)
        if rng.random() < 0.1:
            job = job or store.begin_flush()
        elif job is not None and rng.random() < 0.3:
            if rng.random() < 0.5:
                job.write()
                store.finish_flush(job)
            else:
                job.failed = True
            job = None
        assert store.list() == [(key, twin[key][0]) for key in sorted(twin)] and len(store) == len(twin)
        assert all(store.changed_at(key) == index for key, (_, index) in twin.items())
        assert store.held_bytes == sum(PAIR_BYTES + len(key) + len(value) for key, (value, _) in twin.items())
    if job is not None:
        job.failed = True
    last = store.begin_flush()
    assert last is not None
    last.write()
    again = KeySpace.open(tmp_path / "k")
    assert (again.checksum(), again.held_bytes, again.list()) == (
        store.checksum(),
        store.held_bytes,
        store.list(),
    )


class Counting(Files):
    """Notes how long the pieces are that files are written in."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        def noted() -> Iterable[bytes | memoryview]:
            for part in parts:
                self.pieces.append(len(part))
                yield part

        return super().write_new(path, noted())


def test_a_flush_and_a_check_go_by_small_pieces(tmp_path: Path) -> None:
    """All was put together first: joined, sealed and copied, each of which held the event loop up as a whole."""
    files = Counting()
    store = KeySpace.create(tmp_path / "k", files=files)
    for index in range(1, 5):
        store.apply(replace_entry(index, b"large %d" % index, b"v" * (3 * PIECE_BYTES + index)))
    for index in range(5, 2_005):
        store.apply(replace_entry(index, b"small %d" % index, b"v" * 400))
    files.pieces.clear()
    job = store.begin_flush()
    assert job is not None
    store.apply(replace_entry(2_005, b"later", b"1"))
    job.write()
    size = (tmp_path / "k" / FILE_NAME).stat().st_size
    assert sum(files.pieces) == size > 15 * PIECE_BYTES
    assert max(files.pieces) <= PIECE_BYTES and len(files.pieces) < 50, "neither large nor one for each key"
    pairs = iter([b"v" * 400] * 2_000)
    next(_gathered(pairs))
    assert len(list(pairs)) > 1_000, "no piece waits for all"
    read: list[int] = []
    store.verify(read.append)
    assert sum(read) == size and max(read) <= PIECE_BYTES
    again = KeySpace.open(tmp_path / "k")
    assert len(again) == 2_004 and again.read(b"large 4") == store.read(b"large 4")


def test_a_flush_begins_without_a_copy(tmp_path: Path) -> None:
    """Of a quarter of a million pairs that alone held the event loop for some 10 ms."""
    store = KeySpace.create(tmp_path / "k")
    store.apply(replace_entry(1, b"a", b"1"))
    there = store._pairs._pairs
    job = store.begin_flush()
    assert job is not None and job.pairs is there
    store.apply(replace_entry(2, b"a", b"2"))
    assert job.pairs == {b"a": (b"1", 1, 0)} and store.read(b"a") == b"2"
    job.write()
    store.finish_flush(job)
    assert store._pairs._pairs is there and there == {b"a": (b"2", 2, 0)}


def test_a_large_key_space_is_flushed_for_a_quarter_of_its_size(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k", flush_bytes=1_000)
    for index in range(1, 5):
        store.apply(replace_entry(index, b"%d" % index, b"v" * 10_000))
    assert store.should_flush()
    job = store.begin_flush()
    assert job is not None
    job.write()
    store.finish_flush(job)
    store.apply(replace_entry(5, b"1", b"w" * 9_000))
    assert not store.should_flush()
    store.apply(replace_entry(6, b"1", b"w" * 1_000))
    assert store.should_flush()

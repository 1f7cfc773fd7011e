"""Leases of a key space: what entries do to them and to their keys, alike on all replicas and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.model.errors import Code, Corrupt
from stele.model.kvop import (
    KeyOp,
    KeyOperation,
    decode_operations,
    encode_operations,
    grant,
    lease_key,
    revoke,
)
from stele.tablet import leases
from stele.tablet.checked import HEADER_BYTES
from stele.tablet.keyfile import FILE_NAME
from stele.tablet.keyspace import KeySpace
from tests.tablet.test_keyspace import entry_of


class Space:
    """A key space, and the index of its last entry."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = KeySpace.create(directory)
        self.index = 0

    def do(self, *operations: KeyOperation) -> Code:
        self.index += 1
        return self.store.apply(entry_of(self.index, list(operations))).code

    def put(self, key: bytes, lease: int = 0, op: KeyOp = KeyOp.REPLACE) -> Code:
        return self.do(KeyOperation(op, key, b"v", lease=lease))

    def keys(self) -> list[bytes]:
        return [key for key, _ in self.store.list()]

    def flushed(self) -> KeySpace:
        """The same from its file."""
        job = self.store.begin_flush()
        assert job is not None
        job.write()
        self.store.finish_flush(job)
        return KeySpace.open(self.directory)


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path / "k")


def test_keys_end_with_their_lease_in_one_step(space: Space) -> None:
    assert space.do(grant(7, 2_000)) is Code.OK
    for key in (b"b", b"a", b"c"):
        assert space.put(key, 7) is Code.OK
    assert space.put(b"free") is Code.OK
    assert space.store.lease_of(b"a") == 7 and space.store.lease_of(b"free") == 0
    assert space.do(revoke(7)) is Code.OK
    assert space.keys() == [b"free"] and 7 not in space.store.leases
    (written,) = space.store.recent.after(space.index - 1)
    assert list(written.changes) == [(b"a", None), (b"b", None), (b"c", None)], (
        "those who watch see it as one write"
    )
    assert space.do(revoke(7)) is Code.OK, "also if it is gone"


def test_a_key_is_of_the_lease_that_it_was_last_set_with(space: Space) -> None:
    space.do(grant(1, 1_000), grant(2, 1_000))
    for key in (b"stays", b"moves", b"back"):
        space.put(key, 1)
    space.put(b"stays")
    space.put(b"moves", 2)
    space.do(KeyOperation(KeyOp.DELETE, b"back"))
    space.put(b"back")
    assert list(space.store.leases.keys_of(1)) == [] and list(space.store.leases.keys_of(2)) == [b"moves"]
    space.do(revoke(1))
    assert space.keys() == [b"back", b"moves", b"stays"]
    space.do(revoke(2))
    assert space.keys() == [b"back", b"stays"]


def test_what_a_lease_refuses_changes_nothing(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stele.tablet.keyspace.LEASES_MAX", 2)
    monkeypatch.setattr("stele.tablet.keyspace.LEASE_KEYS_MAX", 3)
    assert space.put(b"a", 5) is Code.LEASE_LOST
    assert space.do(grant(5, 1_000)) is Code.OK
    assert space.do(grant(5, 9_000)) is Code.ALREADY_PRESENT
    assert space.store.leases.ttl_ms == {5: 1_000}
    assert space.do(grant(6, 1_000)) is Code.OK
    assert space.do(grant(7, 1_000)) is Code.TOO_LARGE
    four = [KeyOperation(KeyOp.REPLACE, bytes([n]), b"", lease=5) for n in range(4)]
    assert space.do(*four) is Code.TOO_LARGE and space.keys() == []
    assert space.do(*four[:3]) is Code.OK and space.put(bytes([0]), 5) is Code.OK
    assert space.put(bytes([3]), 5) is Code.TOO_LARGE
    assert space.put(bytes([0]), 5, KeyOp.INSERT) is Code.ALREADY_PRESENT
    assert space.do(KeyOperation(KeyOp.CHECK, b"x", expected=b"y"), revoke(5)) is Code.CAS_FAILED
    assert 5 in space.store.leases
    assert (leases.LEASES_MAX, leases.LEASE_KEYS_MAX) == (10_000, 1_000), (
        "part of what entries do: never changed"
    )


def test_a_restart_and_a_copy_have_the_same_leases(space: Space) -> None:
    before = space.store.checksum()
    space.do(grant(3, 5_000), grant(4, 6_000))
    space.put(b"a", 3)
    space.put(b"b")
    again = space.flushed()
    assert again.leases.ttl_ms == {3: 5_000, 4: 6_000} and list(again.leases.keys_of(3)) == [b"a"]
    assert again.checksum() == space.store.checksum() != before
    other = KeySpace.create(space.directory.parent / "other")
    for index, operations in enumerate(
        (
            [grant(3, 5_000), grant(4, 6_001)],
            [KeyOperation(KeyOp.REPLACE, b"a", b"v", lease=3)],
            [KeyOperation(KeyOp.REPLACE, b"b", b"v")],
        ),
        1,
    ):
        other.apply(entry_of(index, operations))
    assert other.checksum() != again.checksum(), "replicas that differ in a lease are found"
    for store in (space.store, again):
        store.apply(entry_of(space.index + 1, [revoke(3), revoke(4)]))
        assert store.list() == [(b"b", b"v")]
    assert space.store.checksum() == again.checksum()


def test_the_release_before_reads_what_has_no_leases(space: Space) -> None:
    """Its file has version 1 again once the last lease is gone, and the same bytes as ever."""
    space.put(b"a")
    plain = (space.flushed().directory / FILE_NAME).read_bytes()
    space.do(grant(3, 5_000))
    space.put(b"b", 3)
    leased = (space.flushed().directory / FILE_NAME).read_bytes()
    space.do(revoke(3))
    later = (space.flushed().directory / FILE_NAME).read_bytes()
    assert [raw[8] for raw in (plain, leased, later)] == [1, 2, 1]
    assert len(plain) - HEADER_BYTES > 0 and b"leases" in leased and b"leases" not in later
    plain_put = encode_operations([KeyOperation(KeyOp.REPLACE, b"k", b"v")])
    assert plain_put == bytes([1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]) + b"kv"


def test_operations_with_leases_round_trip() -> None:
    operations = [
        grant(1, 1_000),
        revoke(2),
        KeyOperation(KeyOp.CAS, b"k", b"v", b"before", lease=(1 << 63) - 1),
        KeyOperation(KeyOp.REPLACE, lease_key(1), b"a key may look like a lease", lease=3),
    ]
    raw = encode_operations(operations)
    assert decode_operations(raw) == operations
    for end in range(len(raw)):
        with pytest.raises(Corrupt):
            decode_operations(raw[:end])


@pytest.mark.parametrize("wrong", [(b"short", bytes(8)), (bytes(8), b"short")])
def test_a_damaged_grant_ends_applying_before_anything_is_done(
    space: Space, wrong: tuple[bytes, bytes]
) -> None:
    with pytest.raises(Corrupt):
        space.do(KeyOperation(KeyOp.REPLACE, b"a", b"v"), KeyOperation(KeyOp.GRANT, *wrong))
    assert space.keys() == []

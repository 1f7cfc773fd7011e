"""The key space: batches, preconditions, listeners, pending claims, restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OpId
from stele.model.kvop import KeyOp, KeyOperation, decode_operations, encode_operations
from stele.model.writeop import BodyKind, encode
from stele.tablet.checked import HEADER_BYTES, seal
from stele.tablet.keyfile import FILE_NAME
from stele.tablet.keyspace import KeySpace
from tests.tablet.twin import START_US, header


def entry_of(index: int, operations: list[KeyOperation], **change: Any) -> Entry:
    """A WRITE entry of a key space."""
    body = encode_operations(operations)
    head = header(body, kind=BodyKind.KEYSPACE, **change)
    return Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, encode(head, body))


def replace_entry(index: int, key: bytes, value: bytes) -> Entry:
    """An entry that sets one key."""
    return entry_of(index, [KeyOperation(KeyOp.REPLACE, key, value)])


def test_a_batch_is_done_whole_or_not_at_all(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    assert store.apply(entry_of(1, [KeyOperation(KeyOp.INSERT, b"a", b"1")])).code is Code.OK
    both = [KeyOperation(KeyOp.REPLACE, b"b", b"2"), KeyOperation(KeyOp.INSERT, b"a", b"3")]
    outcome = store.apply(entry_of(2, both))
    assert (outcome.code, outcome.value) == (Code.ALREADY_PRESENT, b"1")
    assert store.read(b"b") is None
    cas = [KeyOperation(KeyOp.CAS, b"a", b"3", b"1"), KeyOperation(KeyOp.CAS, b"c", b"new", None)]
    assert store.apply(entry_of(3, cas)).code is Code.OK
    assert store.apply(entry_of(4, cas)).code is Code.CAS_FAILED
    guarded = [KeyOperation(KeyOp.CHECK, b"a", expected=b"other"), KeyOperation(KeyOp.DELETE, b"c")]
    assert store.apply(entry_of(5, guarded)).code is Code.CAS_FAILED
    assert store.apply(entry_of(6, [KeyOperation(KeyOp.DELETE, b"c", expected=b"x")])).code is Code.CAS_FAILED
    assert (
        store.apply(entry_of(7, [KeyOperation(KeyOp.DELETE, b"c"), KeyOperation(KeyOp.DELETE, b"d")])).code
        is Code.OK
    )
    assert store.list() == [(b"a", b"3")]
    assert store.changed_at(b"a") == 3


def test_a_flush_keeps_nothing_of_a_later_write(tmp_path: Path) -> None:
    """Its replay after a restart would be taken for a retry."""
    store = KeySpace.create(tmp_path / "k")
    store.apply(replace_entry(1, b"a", b"1"))
    job = store.begin_flush()
    assert job is not None
    later = entry_of(2, [KeyOperation(KeyOp.REPLACE, b"b", b"2")], client_id=b"1" * 16, sequence=2)
    store.apply(later)
    job.write()
    reopened = KeySpace.open(tmp_path / "k")
    assert reopened.list() == [(b"a", b"1")]
    assert not reopened.apply(later).duplicate
    assert reopened.read(b"b") == b"2"


def test_list_goes_by_prefix_and_page(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    for index, key in enumerate([b"t/b", b"t/a", b"u", b"t/c", b"s"], start=1):
        store.apply(replace_entry(index, key, key))
    assert [k for k, _ in store.list(b"t/")] == [b"t/a", b"t/b", b"t/c"]
    assert [k for k, _ in store.list(b"t/", limit=2)] == [b"t/a", b"t/b"]
    assert [k for k, _ in store.list(b"t/", after=b"t/b")] == [b"t/c"]
    assert [k for k, _ in store.list(b"t/b")] == [b"t/b"]
    assert len(store) == 5


def test_listeners_hear_each_change_in_order(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    heard: list[tuple[bytes, bytes | None, bytes | None, OpId]] = []
    store.add_commit_listener(lambda *change: heard.append(change))
    store.apply(replace_entry(1, b"a", b"1"))
    store.apply(
        entry_of(2, [KeyOperation(KeyOp.REPLACE, b"a", b"2"), KeyOperation(KeyOp.INSERT, b"b", b"1")])
    )
    store.apply(entry_of(3, [KeyOperation(KeyOp.DELETE, b"a"), KeyOperation(KeyOp.DELETE, b"none")]))
    assert heard == [
        (b"a", None, b"1", OpId(1, 1)),
        (b"a", b"1", b"2", OpId(1, 2)),
        (b"b", None, b"1", OpId(1, 2)),
        (b"a", b"2", None, OpId(1, 3)),
    ]


def test_a_key_under_change_is_refused_to_the_later_caller(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    token = store.begin_pending([KeyOperation(KeyOp.INSERT, b"a", b"1")])
    with pytest.raises(Rejected) as caught:
        store.begin_pending([KeyOperation(KeyOp.REPLACE, b"a", b"2")])
    assert caught.value.code is Code.CHANGE_IN_PROGRESS and "key 'a': another change" in str(caught.value)
    store.apply(entry_of(1, [KeyOperation(KeyOp.INSERT, b"a", b"1")]))
    store.end_pending(token)
    with pytest.raises(Rejected) as caught:
        store.begin_pending([KeyOperation(KeyOp.INSERT, b"a", b"2")])
    assert caught.value.code is Code.ALREADY_PRESENT and caught.value.args[0] == "key 'a' is present"
    store.end_pending(store.begin_pending([KeyOperation(KeyOp.REPLACE, b"a", b"2")]))


def test_a_key_that_is_checked_is_claimed_by_nobody_and_not_while_it_changes(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    check = KeyOperation(KeyOp.CHECK, b"a", b"", b"1")
    first = store.begin_pending([check, KeyOperation(KeyOp.REPLACE, b"b", b"1")])
    second = store.begin_pending([check, KeyOperation(KeyOp.REPLACE, b"c", b"1")])
    change = store.begin_pending([KeyOperation(KeyOp.REPLACE, b"a", b"2")])
    with pytest.raises(Rejected, match="key 'a': another change") as caught:
        store.begin_pending([check, KeyOperation(KeyOp.REPLACE, b"d", b"1")])
    assert caught.value.code is Code.CHANGE_IN_PROGRESS
    store.end_pending(first)
    store.end_pending(second)
    with pytest.raises(Rejected):
        store.begin_pending([check])
    store.end_pending(change)
    store.end_pending(store.begin_pending([check]))
    assert not store._claims and not store._claims._owner


def test_restart_comes_back_with_everything(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k", flush_bytes=1)
    for index in range(1, 6):
        store.apply(
            entry_of(
                index,
                [KeyOperation(KeyOp.REPLACE, b"%d" % index, b"v" * index)],
                client_id=b"c" * 16,
                sequence=index,
            )
        )
    assert store.should_flush()
    store.apply(Entry(2, 6, EntryKind.CEILING, 0, (99).to_bytes(8, "little")))
    job = store.begin_flush()
    assert job is not None
    assert store.begin_flush() is None
    store.apply(Entry(2, 7, EntryKind.NOOP, 0, b""))
    job.write()
    store.finish_flush(job)
    again = KeySpace.open(tmp_path / "k")
    assert again.applied == again.flushed == store.flushed == OpId(2, 6)
    assert again.max_ceiling == 99 and again.last_timestamp == store.last_timestamp > 0
    assert again.checksum() == store.checksum()
    assert again.list() == store.list()
    assert again.changed_at(b"3") == 3
    found = store.checkpoint(tmp_path / "copy")
    assert KeySpace.open(tmp_path / "copy").applied == found.opid
    repeated = entry_of(7, [KeyOperation(KeyOp.REPLACE, b"5", b"vvvvv")], client_id=b"c" * 16, sequence=5)
    assert again.apply(replace(repeated, term=2)).duplicate


def test_a_batch_that_is_refused_changes_nothing_and_a_copy_is_as_far_as_its_file(tmp_path: Path) -> None:
    """Also while a flush is written: the checkpoint is of what was flushed last."""
    store = KeySpace.create(tmp_path / "k", flush_bytes=1)
    store.apply(replace_entry(1, b"a", b"1"))
    first = store.begin_flush()
    assert first is not None
    first.write()  # on the disk, and its owner has not been told yet
    found = store.checkpoint(tmp_path / "one")
    assert found.opid == OpId(1, 1) == KeySpace.open(tmp_path / "one").applied
    store.finish_flush(first)
    assert not store.should_flush() and store.begin_flush() is None, "nothing has come since"
    cas = [KeyOperation(KeyOp.REPLACE, b"a", b"2"), KeyOperation(KeyOp.CAS, b"b", b"3", b"other")]
    assert store.apply(entry_of(2, cas)).code is Code.CAS_FAILED
    assert store.list() == [(b"a", b"1")] and store.changed_at(b"a") == 1


def test_no_damaged_byte_goes_unseen(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    store.apply(replace_entry(1, b"a", b"1"))
    job = store.begin_flush()
    assert job is not None
    job.write()
    path = tmp_path / "k" / FILE_NAME
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(Corrupt):
                KeySpace.open(tmp_path / "k")
    path.write_bytes(seal(b"STLONCE1", 1, good[HEADER_BYTES:]))  # whole, and another file
    with pytest.raises(Corrupt):
        KeySpace.open(tmp_path / "k")


def test_operations_code_round_trip_and_faults() -> None:
    operations = [
        KeyOperation(KeyOp.REPLACE, b"a", b""),
        KeyOperation(KeyOp.CAS, b"b", b"v", b""),
        KeyOperation(KeyOp.CHECK, b"a", expected=None),
    ]
    data = encode_operations(operations)
    assert decode_operations(data) == operations
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            decode_operations(data[:end])
    with pytest.raises(Corrupt, match="1 bytes left over"):
        decode_operations(data + b"\0")
    with pytest.raises(Rejected, match=r"a key has 0 bytes.*written twice"):
        encode_operations([KeyOperation(KeyOp.REPLACE, b"")] * 2)
    with pytest.raises(Rejected) as caught:
        decode_operations(b"\x09" + data[1:])
    assert caught.value.code is Code.UNSUPPORTED_VERSION

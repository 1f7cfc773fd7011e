"""What a later program's leader proposed: it ends the applying. As an outcome it would be skipped, and replicas would differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model import schema as schema_module
from stele.model.block import HEADER, RowOp
from stele.model.column import _TYPES
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.kvop import KeyOp, KeyOperation, encode_operations
from stele.model.schema import Schema
from stele.model.writeop import BodyKind, encode
from stele.tablet.block_checks import check_block
from stele.tablet.colformat import NAME, read_footer
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import StateMachine
from stele.tablet.store import TabletStore
from tests.tablet.twin import SCHEMA, START_US, block_of, flush, header, write_entry

ROW = {"k": "a", "n": 1, "v": "x", "w": 2, "d": 0.5}
CLIENT = b"sixteen letters!"

Body = Callable[[], bytes]


def changed(body: bytes, at: int, value: int) -> bytes:
    return body[:at] + bytes([value]) + body[at + 1 :]


def one_op() -> bytes:
    return block_of([ROW], RowOp.UPSERT)


def op_each() -> bytes:
    return block_of([ROW], [RowOp.INSERT])


def batch() -> bytes:
    return encode_operations([KeyOperation(KeyOp.REPLACE, b"a", b"1")])


OP_AT = HEADER.size + 4 * len(SCHEMA.columns)
BLOCKS: list[tuple[str, Body]] = [
    ("version", lambda: changed(one_op(), 0, 2)),
    ("flag", lambda: changed(one_op(), 1, 4)),
    ("operation", lambda: changed(one_op(), 2, 9)),
    ("operation of a row", lambda: changed(op_each(), OP_AT, 8)),
    ("reserved byte", lambda: changed(one_op(), 3, 1)),
    ("reserved bytes", lambda: changed(one_op(), HEADER.size - 2, 1)),
    ("column", lambda: changed(one_op(), HEADER.size, 77)),
    ("rows", lambda: one_op()[:-8]),
]
PLAIN = [
    (name, body)
    for name, body in BLOCKS
    if name in ("version", "flag", "operation", "reserved byte", "reserved bytes")
]
BATCHES: list[tuple[str, Body]] = [
    ("version", lambda: changed(batch(), 0, 2)),
    ("reserved byte", lambda: changed(batch(), 1, 1)),
    ("operation", lambda: changed(batch(), 4, 77)),
    ("flag", lambda: changed(batch(), 5, 4)),
    ("reserved byte of an operation", lambda: changed(batch(), 6, 1)),
    ("bytes behind it", lambda: batch() + b"later"),
]


def named(cases: list[tuple[str, Body]]) -> list[object]:
    return [pytest.param(body, id=name) for name, body in cases]


def keys_entry(index: int, body: bytes) -> Entry:
    head = header(body, kind=BodyKind.KEYSPACE, client_id=CLIENT, sequence=index)
    return Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, encode(head, body))


def ends(machine: StateMachine, entry: Entry) -> SteleError:
    with pytest.raises(SteleError) as ended:
        machine.apply(entry)
    return ended.value


@pytest.mark.parametrize("body", named(BLOCKS))
def test_a_block_of_a_later_program_is_no_outcome(tmp_path: Path, body: Body) -> None:
    """The later leader wrote the rows and acknowledged them; this replica remembered a refusal, and went on without."""
    store = TabletStore.create(tmp_path / "t", SCHEMA)
    ended = ends(store, write_entry(1, body(), client_id=CLIENT, plain=False))
    assert ended.code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize("body", named(PLAIN))
def test_a_plain_block_of_a_later_program_is_no_outcome(tmp_path: Path, body: Body) -> None:
    """Its rows were taken for upserts of this program's version without a look."""
    store = TabletStore.create(tmp_path / "t", SCHEMA)
    ended = ends(store, write_entry(1, body(), client_id=CLIENT, plain=True))
    assert ended.code is Code.UNSUPPORTED_VERSION
    assert store.rows_estimate == 0


@pytest.mark.parametrize("body", named(BATCHES))
def test_a_key_space_batch_of_a_later_program_is_no_outcome(tmp_path: Path, body: Body) -> None:
    store = KeySpace.create(tmp_path / "k")
    ended = ends(store, keys_entry(1, body()))
    assert ended.code is Code.UNSUPPORTED_VERSION
    assert len(store) == 0


def test_what_is_no_longer_what_was_proposed_is_damage(tmp_path: Path) -> None:
    """No later program wrote that, and to upgrade this one would not help."""
    good = write_entry(1, one_op(), plain=False)
    bad = Entry(
        1, 1, EntryKind.WRITE, good.timestamp, changed(good.payload, len(good.payload) - len(one_op()), 2)
    )
    assert isinstance(ends(TabletStore.create(tmp_path / "t", SCHEMA), bad), Corrupt)
    good = keys_entry(1, batch())
    bad = Entry(
        1, 1, EntryKind.WRITE, good.timestamp, changed(good.payload, len(good.payload) - len(batch()), 2)
    )
    assert isinstance(ends(KeySpace.create(tmp_path / "k"), bad), Corrupt)


@pytest.mark.parametrize("body", named(BLOCKS))
def test_what_ends_applying_is_refused_before_it_is_proposed(body: Body) -> None:
    """Else one block of a client would end every replica."""
    with pytest.raises(Rejected):
        check_block(body(), SCHEMA)


def test_files_with_a_type_of_a_later_program_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setitem(_TYPES, "uuid", pa.string())
        known = Schema.make([("k", "int64"), ("u", "uuid")], ["k"])
        store = TabletStore.create(tmp_path / "t", known)
        store.apply(write_entry(1, block_of([{"k": 1, "u": "x"}], RowOp.UPSERT, known), plain=False))
        assert flush(store)
        text = known.to_json()
    schema_module._parsed.cache_clear()  # this program has never known the type
    (path,) = (tmp_path / "t").glob(f"{NAME}*")
    data = path.read_bytes()
    for read in (
        lambda: Schema.from_json(text),
        lambda: TabletStore.open(tmp_path / "t"),
        lambda: read_footer(path.name, len(data), lambda at, length: data[at : at + length]),
    ):
        with pytest.raises(Rejected, match=r"type 'uuid' is unknown.*upgrade") as refused:
            read()
        assert refused.value.code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize("where", ["the write", "a row"])
def test_an_outcome_with_a_code_of_a_later_program_is_no_damage(tmp_path: Path, where: str) -> None:
    outcome = [7, [[0, 999, "later"]], None, 0, ""] if where == "a row" else [7, [], None, 999, "later"]
    state = json.dumps([0, [[CLIENT.hex(), 1, 1, 1, [[1, 5, outcome]]]]], separators=(",", ":")).encode()
    with pytest.raises(Rejected, match=r"code 999 is unknown.*upgrade") as refused:
        ExactlyOnce.decode(state)
    assert refused.value.code is Code.UNSUPPORTED_VERSION

"""How schemas change: what is refused and why, and random changes against a dumb twin."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model.alter import ADDED_DEFAULT_BYTES_MAX, STEPS_MAX, altered, follows
from stele.model.block import RowOp, decode_block, encode_block
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, Step
from stele.rpc.convert_schema import schema_from_pb, schema_to_pb, steps_from_pb, steps_to_pb

BASE = Schema.make([("k", "int64"), ("a", "string", True), ("b", "int32", False, "5")], key=["k"])
NAMES = st.sampled_from(["k", "a", "b", "c", "d", "A", "e"])
STEPS = st.one_of(
    st.builds(
        AddColumn,
        NAMES,
        st.sampled_from(["int8", "string", "double", "odd"]),
        st.booleans(),
        st.sampled_from([None, "1", '"x"', "null"]),
    ),
    st.builds(DropColumn, NAMES),
    st.builds(RenameColumn, NAMES, NAMES),
    st.builds(ChangeDefault, NAMES, st.sampled_from([None, "1", '"x"'])),
)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([], "0 changes of columns"),
        ([DropColumn("a")] * (STEPS_MAX + 1), "1001 changes of columns"),
        ([DropColumn("k")], "column k is in the primary key and cannot be dropped"),
        ([DropColumn("aa")], "there is no column aa; did you mean 'a'?"),
        ([RenameColumn("x", "y")], "there is no column x"),
        ([RenameColumn("a", "B")], "there is a column b already (case is ignored)"),
        ([RenameColumn("a", "1")], "column name '1'"),
        ([RenameColumn("a", "__stele_x")], "reserved for Stele"),
        ([AddColumn("K", "int8", True)], "there is a column k already"),
        (
            [AddColumn("c", "int8")],
            "column c: stored rows need a value; make it nullable or give it a default",
        ),
        ([AddColumn("c", "int8", False, "null")], "its default is null, but the column is not nullable"),
        ([AddColumn("c", "int8", False, "300")], "300 is not an int8"),
        (
            [AddColumn("c", "double", True, "9007199254740993")],
            "column c: the default 9007199254740993 is not a double",
        ),
        *(
            (
                [AddColumn("c", "int33", *more)],
                "alter: column c: type 'int33' is unknown; expected one of bool, int8",
            )
            for more in ((), (True,), (False, "3"))
        ),
        ([AddColumn("c", "decimal(3,4)")], "alter: column c: type decimal(3,4): expected"),
        (
            [AddColumn("c", "string", True, '"' + "x" * ADDED_DEFAULT_BYTES_MAX + '"')],
            "column c: a default of 258 bytes; at most 256 are allowed for an added column",
        ),
        ([ChangeDefault("b", '"x"')], "is not an int32"),
        ([DropColumn("x"), DropColumn("y")], "there is no column x; there is no column y"),
    ],
)
def test_what_is_refused(steps: list[Step], why: str) -> None:
    with pytest.raises(Rejected) as caught:
        altered(BASE, steps)
    assert why in str(caught.value.args[0])


def test_a_column_id_is_never_used_again() -> None:
    """Also by a new column with the name of a dropped one."""
    again = altered(BASE, [DropColumn("a"), AddColumn("a", "int8", True)])
    assert [(c.id, c.name, c.type) for c in again.columns] == [
        (0, "k", "int64"),
        (2, "b", "int32"),
        (3, "a", "int8"),
    ]
    assert (again.version, again.next_column_id) == (2, 4)


def test_the_read_default_is_that_of_the_time_when_the_column_was_added() -> None:
    added = altered(BASE, [AddColumn("c", "int8", False, "1")])
    changed = altered(added, [ChangeDefault("c", "2"), RenameColumn("c", "d")])
    column = changed.by_name["d"]
    assert (column.default, column.read_default) == ("2", "1")
    assert (column.default_scalar().as_py(), column.read_scalar().as_py()) == (2, 1)
    assert BASE.by_name["b"].read_scalar().as_py() is None
    assert Schema.from_json(changed.to_json()) == changed == schema_from_pb(schema_to_pb(changed))


def test_a_schema_that_was_never_altered_has_the_text_of_earlier_releases() -> None:
    assert BASE.to_json() == (
        '{"version":1,"columns":[[0,"k","int64",false,null],[1,"a","string",true,null],[2,"b","int32",false,"5"]],'
        '"key":[0],"next_column_id":3}'
    )


@given(st.lists(STEPS, min_size=1, max_size=6))
def test_random_changes_against_a_dumb_twin(steps: list[Step]) -> None:
    """The twin is a list of [id, name]; it knows only names and ids, so it may allow more."""
    columns = [[int(c.id), c.name] for c in BASE.columns]
    next_id, sound = BASE.next_column_id, True
    for step in steps:
        at = next((i for i, (_, name) in enumerate(columns) if name == step.name), None)
        if isinstance(step, AddColumn):
            sound &= all(name.lower() != step.name.lower() for _, name in columns)
            columns.append([next_id, step.name])
            next_id += 1
        elif at is None:
            sound = False
        elif isinstance(step, DropColumn):
            sound &= columns[at][0] != 0
            del columns[at]
        elif isinstance(step, RenameColumn):
            others = [name.lower() for i, (_, name) in enumerate(columns) if i != at]
            sound &= step.new_name.lower() not in others
            columns[at][1] = step.new_name
    try:
        new = altered(BASE, steps)
    except Rejected as exc:
        assert exc.code is Code.INVALID_ARGUMENT and exc.args[0]
        return
    assert sound
    assert [[int(c.id), c.name] for c in new.columns] == columns
    assert follows(new, BASE) and not follows(BASE, new)
    assert steps_from_pb(steps_to_pb(steps)) == (steps, [])
    for column in new.columns:
        before = BASE.by_id.get(int(column.id))
        if before is not None:
            assert (column.type, column.nullable, column.read_default) == (
                before.type,
                before.nullable,
                None,
            )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": 2, "key": [1]},
        {"version": 2, "types": {1: "int8"}},
        {"version": 2, "next": 2},
        {"version": 2, "added": 1},
    ],
)
def test_a_schema_that_does_not_follow(change: dict[str, Any]) -> None:
    """Whatever a master orders: a tablet keeps its key and the types of its column ids."""
    old = altered(BASE, [AddColumn("c", "int8", True), DropColumn("a")])  # ids 0, 2, 3; the next is 4
    columns = [
        (name, change.get("types", {}).get(at, type_), False, None)
        for at, (name, type_) in enumerate([("k", "int64"), ("b", "int32")])
    ]
    made = Schema.make(columns, key=["k"])
    raw = made.to_json().replace('[1,"b"', f'[{change.get("added", 2)},"b"')
    raw = raw.replace('"key":[0]', f'"key":[{2 * change["key"][0]}]') if "key" in change else raw
    raw = raw.replace('"version":1', f'"version":{change["version"] + 1}')
    raw = raw.replace('"next_column_id":2', f'"next_column_id":{change.get("next", 3) + 1}')
    if change["version"] == 1:
        raw = raw.replace('"version":2', '"version":1')
    assert not follows(Schema.from_json(raw), old)


def test_blocks_of_older_and_newer_schemas() -> None:
    added = altered(BASE, [AddColumn("c", "int8", False, "1")])
    rows = pa.record_batch([[1], ["x"], pa.array([2], "int32")], schema=BASE.to_arrow())
    older = encode_block(RowOp.UPSERT, BASE.column_ids, rows, 1)
    assert decode_block(older, added).column_ids == (0, 1, 2)
    dropped = altered(added, [DropColumn("a")])
    with pytest.raises(Rejected, match=r"column ids \[1\] were dropped before schema version 3") as caught:
        decode_block(older, dropped)
    assert caught.value.code is Code.SCHEMA_MISMATCH
    newer = encode_block(RowOp.UPSERT, BASE.column_ids, rows, 2)
    with pytest.raises(Rejected, match="schema version 2, the tablet has 1") as caught:
        decode_block(newer, BASE)
    assert caught.value.code is Code.SCHEMA_MISMATCH

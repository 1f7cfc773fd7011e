"""Definitions in files: nothing in them is guessed or dropped, and what is printed of a table is read again."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from stele.cli.errors import error_lines
from stele.cli.schema_file import DELETION_POLICIES, table_from_file, table_from_options
from stele.cli.tables import _as_json
from stele.client import TableInfo
from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema

GOOD = """kind: TabletGroup
apiVersion: stele.dev/v1alpha1
metadata: {name: people, labels: {team: data}}
spec:
  clusterRef: {name: flights}
  replicationFactor: 3
  columns:
  - {name: id, type: int64}
  - {name: born, type: date, default: 2024-01-01}
  - {name: name, type: string, nullable: true}
  primaryKey: [id]
  partitioning: {hash: [{columns: [id], buckets: 4}]}
  deletionPolicy: Retain
status: {anything: 1}
"""


def definition(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    return table_from_file(str(file))


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(Rejected) as told:
        definition(tmp_path, text)
    message = str(told.value.args[0])
    assert message.startswith(f"{tmp_path / 't.yaml'}: ")
    return message.removeprefix(f"{tmp_path / 't.yaml'}: ")


def test_a_definition_is_read(tmp_path: Path) -> None:
    table = definition(tmp_path, GOOD)
    assert (table.name, table.replication_factor) == ("people", 3)
    assert table.partitioning == PartitionSchema((HashPartition((0,), 4),))
    assert table.unused == ("clusterRef", "deletionPolicy")
    assert [c.default for c in table.schema.columns] == [None, '"2024-01-01"', None]


@pytest.mark.parametrize(
    ("was", "is_now", "told"),
    [
        (
            "nullable: true",
            "nulable: true",
            "line 10, spec.columns[2].nulable: unknown key 'nulable'; did you mean 'nullable'?",
        ),
        (
            "replicationFactor: 3",
            "replicas: 3",
            "line 6, spec.replicas: unknown key 'replicas'; did you mean 'replicationFactor'?",
        ),
        ("primaryKey", "primary_key", "unknown key 'primary_key'; did you mean 'primaryKey'?"),
        ("labels", "label", "line 3, metadata.label: unknown key 'label'; did you mean 'labels'?"),
        ("status", "satus", "unknown key 'satus'; did you mean 'status'?"),
        (
            "buckets: 4",
            "bucket: 4",
            "line 12, spec.partitioning.hash[0].bucket: unknown key 'bucket'; did you mean 'buckets'?",
        ),
        ("{hash:", "{hashes:", "unknown key 'hashes'; did you mean 'hash'?"),
        ("buckets: 4}", "buckets: 4, zzz: 1}", "unknown key 'zzz'; known keys are columns, buckets, seed"),
        (
            "nullable: true",
            "nullable: 'true'",
            "line 10, spec.columns[2].nullable: the text 'true'; expected true or false",
        ),
        ("nullable: true", "nullable: 1", "nullable: 1; expected true or false"),
        (
            "buckets: 4",
            "buckets: 4.5",
            "line 12, spec.partitioning.hash[0].buckets: 4.5; expected a whole number, 2 or more",
        ),
        ("buckets: 4", "buckets: '4'", "buckets: the text '4'; expected a whole number, 2 or more"),
        ("buckets: 4", "buckets: true", "buckets: true; expected a whole number, 2 or more"),
        ("buckets: 4", "buckets: 4, seed: true", "seed: true; expected a whole number, 0 or more"),
        ("buckets: 4", "buckets: 1", "buckets: 1; expected a whole number, 2 or more"),
        (
            "replicationFactor: 3",
            "replicationFactor: 3.0",
            "line 6, spec.replicationFactor: 3.0; expected 1, 3, 5 or 7",
        ),
        ("replicationFactor: 3", "replicationFactor: true", "true; expected 1, 3, 5 or 7"),
        (
            "replicationFactor: 3",
            "replicationFactor: 0",
            "line 6, spec.replicationFactor: 0; expected 1, 3, 5 or 7",
        ),
        (
            "replicationFactor: 3",
            "replicationFactor: 2",
            "line 6, spec.replicationFactor: 2; expected 1, 3, 5 or 7",
        ),
        ("type: string", "type: [string]", "spec.columns[2].type: a list; expected a type, like int64"),
        ("name: people", "name: [people]", "metadata.name: a list; expected a name"),
        ("name: people", "name: 7", "metadata.name: 7; expected a name; put it in quotes"),
        ("name: name", "name: no", "spec.columns[2].name: false; expected a name; put it in quotes"),
        ("default: 2024-01-01", "default: [1]", "default: a list; expected a text, a number, true or false"),
        ("columns: [id], b", "columns: id, b", "columns: the text 'id'; expected a list of column names"),
        ("columns: [id], b", "columns: [idd], b", "columns[0]: no column 'idd'; did you mean 'id'?"),
        (
            "primaryKey: [id]",
            "primaryKey: [idd]",
            "line 11, spec.primaryKey[0]: no column 'idd'; did you mean 'id'?",
        ),
        ("primaryKey: [id]", "primaryKey: {id: 1}", "a mapping; expected a list of column names"),
        ("Retain", "Keep", "line 13, spec.deletionPolicy: the text 'Keep'; expected one of Retain, Delete"),
        ("{name: flights}", "other", "spec.clusterRef: the text 'other'; expected a mapping with name"),
        ("{name: flights}", "{nam: flights}", "spec.clusterRef: name is missing"),
        (
            "columns: [id], buckets",
            "columns: [id, buckets",
            "not valid YAML or JSON: line 12, column 50: expected ',' or ']', but got '}' while parsing a flow sequence",
        ),
        ("v1alpha1", "v1", "line 2, apiVersion: the text 'stele.dev/v1'; expected stele.dev/v1alpha1"),
        ("kind: TabletGroup", "kind: [TabletGroup]", "line 1, kind: a list; expected TabletGroup"),
        (
            "  primaryKey: [id]\n",
            "  primaryKey: [id]\n  primaryKey: [id]\n",
            "line 12, spec.primaryKey: 'primaryKey' appears twice; the first is on line 11",
        ),
        (
            "primaryKey: [id]",
            "primaryKey: [id, id]",
            "line 11, spec.primaryKey[1]: column 'id' is named twice",
        ),
        (
            "primaryKey: [id]",
            "primaryKey: []",
            "line 11, spec.primaryKey: an empty list; expected column names",
        ),
        (
            "name: born",
            "name: ID",
            "line 9, spec.columns[1]: column ID: the name is used twice (case is ignored)",
        ),
        (
            "primaryKey",
            "historyRetention: 5s\n  primaryKey",
            "line 11, spec.historyRetention: 5s; expected 1 minute to 10 years",
        ),
        ("{name: id, type: int64}", "{name: id}", "line 8, spec.columns[0]: type is missing"),
        (
            "{name: id, type: int64}",
            "id",
            "spec.columns[0]: the text 'id'; expected a mapping with name, type",
        ),
    ],
)
def test_what_is_no_definition_is_told_with_its_place(
    tmp_path: Path, was: str, is_now: str, told: str
) -> None:
    assert GOOD.count(was) >= 1
    assert told in refusal(tmp_path, GOOD.replace(was, is_now, 1))


def test_all_faults_are_told_together(tmp_path: Path) -> None:
    text = GOOD.replace("nullable: true", "nulable: true").replace(
        "replicationFactor: 3", "replicationFactor: x"
    )
    told = refusal(tmp_path, text.replace("type: date", "typ: date"))
    assert all(
        word in told for word in ("nulable", "replicationFactor", "'typ'", "columns[1]: type is missing")
    )


def test_faults_of_the_partitioning_are_told_beside_a_wrong_type_or_key(tmp_path: Path) -> None:
    text = GOOD.replace("buckets: 4", "buckets: x").replace("columns: [id], b", "columns: [idd], b")
    for was, is_now, told in (
        ("type: int64", "type: int65", "int65"),
        ("primaryKey: [id]", "primaryKey: [key]", "no column 'key'"),
        ("nullable: true", "nulable: true", "nulable"),
        ("Retain", "Keep", "Keep"),
    ):
        faults = refusal(tmp_path, text.replace(was, is_now))
        assert all(word in faults for word in (told, "buckets: the text 'x'", "no column 'idd'")), faults


def test_faults_of_every_kind_are_told_at_once_in_the_order_of_their_lines(tmp_path: Path) -> None:
    """They came in stages: a key that stands twice hid all others, and a wrong type those of key and partitions."""
    file = """kind: [TabletGroup]
apiVersion: stele.dev/v2
metadata: {name: people}
spec:
  replicationFactor: 4
  columns:
  - {name: id, type: int65}
  - {name: born, type: date, type: date, default: noon}
  - {name: name, type: string, nullable: true}
  primaryKey: [id, nam]
  partitioning:
    hash:
    - {columns: [name], buckets: 1}
    - {columns: [name], buckets: 4}
    - {columns: [id], buckets: 4}
    - {columns: [id], buckets: 8}
  comment: 7
  historyRetention: 5 weeks
  historyRetention: 5s
"""
    (tmp_path / "t.yaml").write_text(file)
    with pytest.raises(Rejected) as told:
        table_from_file(str(tmp_path / "t.yaml"))
    head, *faults = error_lines(told.value)
    assert head == f"INVALID_ARGUMENT: {tmp_path / 't.yaml'}:"
    assert [fault.strip() for fault in faults] == [
        "line 1, kind: a list; expected TabletGroup",
        "line 2, apiVersion: the text 'stele.dev/v2'; expected stele.dev/v1alpha1",
        "line 5, spec.replicationFactor: 4; expected 1, 3, 5 or 7",
        "line 7, spec.columns[0].type: column id: type 'int65' is unknown; expected one of bool, int8, int16, int32, int64, "
        "float, double, string, binary, date, timestamp, decimal(p,s)",
        "line 8, spec.columns[1].type: 'type' appears twice; the first is on line 8",
        "line 8, spec.columns[1].default: column born: the default \"noon\" is not a date (Invalid isoformat string: 'noon')",
        "line 10, spec.primaryKey[1]: no column 'nam'; did you mean 'name'?",
        "line 11, spec.partitioning: columns ['name'] are in two hashes; expected each column in one",
        "line 11, spec.partitioning: columns ['id'] are in two hashes; expected each column in one",
        "line 13, spec.partitioning.hash[0].buckets: 1; expected a whole number, 2 or more",
        "line 13, spec.partitioning.hash[0]: ['name'] are not key columns; only key columns are allowed, because a row "
        "never changes its tablet",
        "line 14, spec.partitioning.hash[1]: ['name'] are not key columns; only key columns are allowed, because a row "
        "never changes its tablet",
        "line 17, spec.comment: 7; expected text; put it in quotes",
        "line 19, spec.historyRetention: 'historyRetention' appears twice; the first is on line 18",
        "line 19, spec.historyRetention: 5s; expected 1 minute to 10 years, such as 90m or 7d",
    ]


def test_faults_of_one_column_and_of_one_partition_are_told_together_each_at_its_field(
    tmp_path: Path,
) -> None:
    """An unknown key of a column hid its wrong name, type and default; one of a hash its columns; one of ranges their splits."""
    file = """spec:
  columns:
  - name: 1d
    nulable: true
    type: int64
    default: 1.5
  - name: day
    type: dat
    nullable: yes it is
  - {name: n, type: double, nullable: true, idd: 7}
  - name: m
    default: 5
  - {name: k, type: int32}
  primaryKey: [day, n, k]
  partitioning:
    hash:
    - {columns: [m, q], buckets: 1, seed: 4294967296}
    range:
      columns: [k]
      splitAtt: [1]
      splitAt: [x, 3]
"""
    (tmp_path / "t.yaml").write_text(file)
    with pytest.raises(Rejected) as told:
        table_from_file(str(tmp_path / "t.yaml"))
    faults = [fault.strip() for fault in error_lines(told.value)[1:]]
    assert [fault.split(": ")[0].split(", ")[-1] for fault in faults] == [
        "spec.columns[0].name",
        "spec.columns[0].nulable",
        "spec.columns[0].default",
        "spec.columns[1].type",
        "spec.columns[1].nullable",
        "spec.columns[2].idd",
        "spec.columns[2].nullable",
        "spec.columns[2].type",
        "spec.columns[3]",
        "spec.partitioning.hash[0].columns[1]",
        "spec.partitioning.hash[0].buckets",
        "spec.partitioning.hash[0]",
        "spec.partitioning.hash[0]",
        "spec.partitioning.range.splitAtt",
        "spec.partitioning.range.splitAt[0]",
    ], faults
    lines = [int(fault.split(",")[0].removeprefix("line ")) for fault in faults]
    assert lines == sorted(lines)


def test_options_and_columns_are_told_together() -> None:
    with pytest.raises(Rejected) as told:
        table_from_options("t", ["id:int65", "1x:int64", "n"], "idd", ["id:1", "m:4"])
    said = " ".join(error_lines(told.value))
    for words in (
        "--column n: expected NAME:TYPE",
        "--key idd",
        "--hash id:1",
        "--hash m:4",
        "'int65'",
        "'1x'",
    ):
        assert words in said, said


def test_each_fault_is_printed_on_a_line_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(Rejected) as told:
        definition(tmp_path, GOOD.replace("buckets: 4", "buckets: x").replace("type: int64", "type: 7"))
    head, first, second = error_lines(told.value)
    assert head.endswith("t.yaml:") and "type: 7" in first and "buckets: the text 'x'" in second


def test_deletion_policies_are_those_of_the_resource() -> None:
    (path,) = (Path(__file__).parents[2] / "crds").glob("*tabletgroup*.yaml")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert tuple(spec["deletionPolicy"]["enum"]) == DELETION_POLICIES


def test_keys_that_stand_twice_in_json_are_told(tmp_path: Path) -> None:
    assert refusal(tmp_path, '{"columns": [],\n "columns": [], "primaryKey": []}').startswith(
        "line 2, columns: 'columns' appears twice; the first is on line 1; line 2, columns: an empty list"
    )


COLUMNS = [
    ("id", "int64"),
    ("day", "date"),
    ("at", "timestamp"),
    ("s", "string"),
    ("b", "binary"),
    ("d", "decimal(10,2)"),
    ("f", "bool"),
    ("text", "string", True, '"no"'),
    ("half", "double", False, "-Infinity"),
    ("large", "double", False, "1e+16"),
    ("price", "decimal(20,10)", False, '"0.1234567891"'),
    ("when", "timestamp", True, '"2024-01-01T00:00:00"'),
    ("yes", "bool", False, "true"),
]
KEY = ["id", "day", "at", "s", "b", "d", "f"]
SCHEMA = Schema.make(COLUMNS, KEY)
SPLIT = (7, date(2024, 1, 1), datetime(2024, 1, 1, 12), "a'\n\u20ac", b"\x00\xff", Decimal("-1.50"), True)


@pytest.mark.parametrize(
    "partitioning",
    [
        PartitionSchema(),
        PartitionSchema((HashPartition((0, 3), 4), HashPartition((1,), 2, 77))),
        PartitionSchema(
            (),
            RangePartition(
                tuple(range(7)),
                (encode_tuple(SPLIT, [SCHEMA.columns[i].arrow for i in range(7)]), b"\xf0\x01"),
            ),
        ),
        PartitionSchema(
            (HashPartition((0,), 2),),
            RangePartition((1,), (encode_tuple((date(2024, 7, 1),), [pa.date32()]),)),
        ),
    ],
)
def test_what_describe_prints_makes_the_same_table(tmp_path: Path, partitioning: PartitionSchema) -> None:
    info = TableInfo("a" * 32, "people", "RUNNING", "table", SCHEMA, partitioning, 5, 8, 8)
    table = definition(tmp_path, json.dumps(_as_json(info, 8), indent=2, default=str))
    assert (table.name, table.replication_factor, table.partitioning) == ("people", 5, partitioning)
    assert (
        table.schema.to_arrow() == SCHEMA.to_arrow() and table.schema.key_column_ids == SCHEMA.key_column_ids
    )
    assert [c.default_scalar() for c in table.schema.columns] == [c.default_scalar() for c in SCHEMA.columns]


def test_split_values_that_are_none_are_told(tmp_path: Path) -> None:
    for split, told in (
        ("[x]", "not an int64"),
        ("{encoded: zz}", "expected values, or"),
        ("[1, 2]", "expected a value for each of id"),
        ("null", "a key is never null"),
    ):
        text = GOOD.replace(
            "hash: [{columns: [id], buckets: 4}]", f"range: {{columns: [id], splitAt: [{split}]}}"
        )
        assert told in refusal(tmp_path, text)
        assert "spec.partitioning.range.splitAt[0]" in refusal(tmp_path, text)
    text = GOOD.replace("hash: [{columns: [id], buckets: 4}]", "range: {columns: [id], splitAt: [10, [20]]}")
    assert definition(tmp_path, text).partitioning.tablets == 3

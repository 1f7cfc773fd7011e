"""Parsers of what people write and of what lies in files: manifests, ranges, definitions, predicates, backups, column files.

Each has valid inputs to spoil and the errors that it documents; see hunt.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import click
import google_crc32c
import yaml
from structlog.testing import capture_logs

from stele.backup.manifest import Base, FileEntry, Manifest, TableEntry, TabletEntry, seal
from stele.cli.range_text import bounds_for, parse_ranges
from stele.cli.schema_file import table_from_file
from stele.client.predicates import parse_predicates
from stele.model.ids import ClusterId, NodeId, OpId
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.tserver.node_record import NODE_FILE, Dropped, NodeRecord, read_record, write_record
from stele_operator.answers import TEXT_MAX, bounded, respond
from stele_operator.kube import KubeError
from stele_operator.observe import parse_identity
from stele_operator.plan.foretold import Foretold
from stele_operator.plan.manifests import identity_data
from stele_operator.plan.observation import FirstMaster, Identity
from stele_operator.preview import read_manifests
from tests.fuzz.hunt import Parse, Parser

ID = "5" * 32
BACKUP_ID = "20240501T120000Z-0a1b2c3d"
SCHEMA = Schema.make(
    [
        ("id", "int64"),
        ("name", "string", True),
        ("price", "decimal(12,2)", True),
        ("at", "timestamp", True),
        ("blob", "binary", True),
        ("ok", "bool", True),
        ("day", "date", True),
        ("x", "double", True),
        ("tiny", "int8", True),
    ],
    ["id"],
)
HASHED = PartitionSchema((HashPartition((0,), 4, 0),), None)
YAML_WORDS = (
    *(b"!!int ", b"!!int ''", b"!!bool ", b"!!float ", b"!!binary ", b"!!timestamp ", b"!!set ", b"!!omap "),
    *(b"!!pairs ", b"!!null ", b"!!str ", b"!!map ", b"!!seq ", b"!x ", b"!!python/object:os.system "),
    *(
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"<<: [*a, *a]\n",
        b"? ",
        b"- ",
        b"---\n",
        b"...\n",
        b"%YAML 9.9\n",
        b"|\n",
        b">-\n",
    ),
    *(
        b"~",
        b".inf",
        b".nan",
        b"0x_",
        b"1:60:61",
        b"9" * 5_000,
        b"2024-02-30",
        b"2024-01-01T25:00:00Z",
        b"\t",
        b"\x00",
    ),
)
JSON_WORDS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"9" * 5_000,
    b'"\\ud800"',
    b"null",
    b"true",
    b"[]",
)


def table() -> list[Parser]:
    """All of them."""
    return [*_of_backups(), *_of_volumes(), *_of_command_line(), *_of_operator()]


def _in_folder(parse: Callable[[Path], object], name: str) -> Parse:
    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
            (Path(folder) / name).write_bytes(data)
            return parse(Path(folder))

    return run


def _sealed_by(of_fields: Callable[[Any], bytes]) -> Callable[[bytes], bytes]:
    """What makes a right checksum for a text that is JSON; another text stays as it is."""

    def reseal(body: bytes) -> bytes:
        try:
            return of_fields(json.loads(body))
        except (ValueError, RecursionError, TypeError):
            return body

    return reseal


# --- backups


def _of_backups() -> list[Parser]:
    files = (FileEntry(f"{ID}-00000-aa.parquet", 10, 999, "0" * 64),)
    tablet = TabletEntry(ID, 0, files, 2)
    a_table = TableEntry("t", ID, "t-1", SCHEMA, HASHED, 3, (tablet,), "me", "a table")
    begun = datetime(2024, 5, 1, 12, tzinfo=UTC)
    full = Manifest(
        BACKUP_ID, ID, 7_000_000_000_000_000_000, begun, begun, "stele 1", (a_table,), None, "hold"
    )
    changes = replace(a_table, tablets=(replace(tablet, whole=False),))
    base = Base("20240430T120000Z-0a1b2c3d", "1" * 64)
    later = replace(full, tables=(changes,), base=base, hold="", finished=None)
    seeds = [json.dumps(json.loads(made.sealed())["content"]).encode() for made in (full, later)]
    return [Parser("backup manifest", seeds, _backup, json_from=0, reseal=_sealed_by(seal))]


def _backup(data: bytes) -> object:
    found = Manifest.of(data, "manifest.json", BACKUP_ID)
    names = [found.name_of(table, file) for table in found.tables for file in table.files]
    return found.kind, found.time, found.digest, found.rows, found.file_bytes, names, found.sealed()


# --- a node's volume


def _of_volumes() -> list[Parser]:
    return [
        Parser(
            "node.json",
            _node_records(),
            _in_folder(read_record, NODE_FILE),
            (),
            0,
            _sealed_by(_with_checksum),
        ),
    ]


def _node_records() -> list[bytes]:
    plain = NodeRecord(ClusterId(ID), NodeId(ID), "node", "f", 3, masters=("h:1",))
    full = replace(
        plain,
        role="master",
        first_masters=((ID, "h:1"),),
        catalog=OpId(1, 2),
        fork_id="6" * 32,
        given=("h:1",),
        taken_back=("2024",),
        dropped=Dropped((ID,), 5, OpId(1, 2)),
    )
    seeds = []
    for record in (plain, full):
        with tempfile.TemporaryDirectory(prefix="stele-fuzz-") as folder:
            write_record(Path(folder), record)
            fields = json.loads((Path(folder) / NODE_FILE).read_text())
        seeds.append(json.dumps({key: value for key, value in fields.items() if key != "crc32c"}).encode())
    return seeds


def _with_checksum(fields: Any) -> bytes:
    if not isinstance(fields, dict):
        return json.dumps(fields).encode()
    crc = int(google_crc32c.value(json.dumps(fields, sort_keys=True).encode()))
    return json.dumps(fields | {"crc32c": crc}).encode()


# --- the command line and the client


def _of_command_line() -> list[Parser]:
    described = {
        "name": "t",
        "columns": [
            {"name": "id", "type": "int64", "id": 0},
            {"name": "x", "type": "double", "nullable": True, "default": 1.5},
            {"name": "p", "type": "decimal(12,2)", "nullable": True, "default": "1.25"},
        ],
        "primaryKey": ["id"],
        "replicationFactor": 3,
        "partitioning": {
            "hash": [{"columns": ["id"], "buckets": 4, "seed": 0}],
            "range": {"columns": ["id"], "ranges": [{"from": 1, "to": 5}, {"from": [7]}]},
        },
        "owner": "me",
        "comment": "",
        "historyRetention": "7d",
    }
    split = {**described, "partitioning": {"range": {"columns": ["id"], "splitAt": [1, [5]]}}}
    path = _in_folder(lambda folder: table_from_file(str(folder / "t.yaml")), "t.yaml")
    ranges = [
        ("int64", "1000..2000", ["id"]),
        ("string", '"a".."b"', ["name"]),
        ("date", "2024-01-01..2024-02-01", ["day"]),
        ("decimal", "1.25..", ["price"]),
        ("timestamp", "..2024-01-01T00:00:00", ["at"]),
        ("binary", "00ff..0100", ["blob"]),
        ("several columns", '["a",1]..["b",2]', ["name", "tiny"]),
    ]
    given = [
        [["id", ">=", 5], "name IN ('a', 'b')", ["x", "is_null"]],
        ["id", "=", 7],
        [["id", "in", [1, 2]], ["day", "is_null"], ["ok", "=", True], ["blob", "!=", "x"]],
    ]
    return [
        Parser(
            "described table", [json.dumps(d).encode() for d in (described, split)], path, (), 0, costly=True
        ),
        Parser(
            "described table as YAML",
            [yaml.safe_dump(d).encode() for d in (described, split)],
            path,
            costly=True,
            words=YAML_WORDS,
        ),
        *(
            Parser(
                f"range of {name}",
                [text.encode()],
                _range_of(columns),
                (click.UsageError, UnicodeDecodeError),
                words=(*JSON_WORDS, b"..", b"[", b'"', b"[" * 3_000, b'{"encoded": "00"}', b'{"encoded": 5}'),
            )
            for name, text, columns in ranges
        ),
        Parser("predicates", [json.dumps(p).encode() for p in given], _predicates, (ValueError,), 0),
    ]


def _range_of(columns: list[str]) -> Parse:
    ids = [int(SCHEMA.by_name[name].id) for name in columns]
    return lambda data: bounds_for(SCHEMA, ids, "--add-range", parse_ranges("--add-range", [data.decode()]))


def _predicates(data: bytes) -> object:
    """ValueError is the JSON's here; the predicates' own errors are SteleErrors."""
    try:
        given = json.loads(data)
    except RecursionError as exc:
        raise ValueError("no JSON") from exc
    try:
        return list(parse_predicates(given, SCHEMA))
    except ValueError as exc:
        raise RuntimeError(f"a predicate let {exc!r} through") from exc


# --- the operator


def _of_operator() -> list[Parser]:
    cluster = {
        "apiVersion": "stele.dev/v1alpha1",
        "kind": "TabletCluster",
        "metadata": {"name": "flights", "namespace": "data", "labels": {"a": "b"}},
        "spec": {
            "image": "stele/node:1",
            "masters": {"replicas": 3, "storage": {"size": "1Gi"}},
            "nodes": {"replicas": 5, "storage": {"size": "2Gi"}, "podLabels": {"a": "b"}},
        },
    }
    group = {
        "apiVersion": "stele.dev/v1alpha1",
        "kind": "TabletGroup",
        "metadata": {"name": "events"},
        "spec": {
            "clusterRef": {"name": "flights"},
            "columns": [{"name": "id", "type": "int64"}, {"name": "s", "type": "string", "nullable": True}],
            "primaryKey": ["id"],
            "partitioning": {"hash": [{"columns": ["id"], "buckets": 8}]},
        },
    }
    listed = {"apiVersion": "v1", "kind": "List", "items": [cluster, group]}
    manifests: Parse = lambda data: read_manifests(data.decode("utf-8", "replace"), "new.yaml")  # noqa: E731
    patches = [
        {"nodes": {"replicas": 4}},
        {"image": "x", "masters": {"resources": {"limits": {"memory": "1Gi"}}}},
    ]
    return [
        Parser(
            "plan -f",
            [json.dumps(each).encode() for each in (listed, cluster, group)],
            manifests,
            (),
            0,
            costly=True,
        ),
        Parser(
            "plan -f as YAML",
            [yaml.safe_dump_all([cluster, group]).encode(), yaml.safe_dump(listed).encode()],
            manifests,
            costly=True,
            words=YAML_WORDS,
        ),
        Parser(
            "plan annotation",
            [json.dumps(patch).encode() for patch in patches],
            _annotation,
            (),
            0,
            costly=True,
        ),
        Parser(
            "plan annotation as YAML",
            [yaml.safe_dump(patch).encode() for patch in patches],
            _annotation,
            costly=True,
            words=YAML_WORDS,
        ),
        Parser(
            "identity ConfigMap",
            [json.dumps(_identity()).encode()],
            _parse_identity,
            (KubeError,),
            0,
            words=(b"[" * 3_000, b"{", b"5", b"-1", b"null", b"9" * 5_000, b"x"),
        ),
    ]


def _annotation(data: bytes) -> object:
    from tests.operator.test_answers import observed

    return _answered(_cached(observed), data.decode("utf-8", "replace"))


@cache
def _cached(observed: Callable[[str], Any]) -> Any:
    return observed("")


def _answered(o: Any, question: str) -> Foretold:
    """The answer as far as it depends on the text: the rehearsal behind it is not played."""
    told = respond(o, question, o.catalog, lambda: True)
    if len(bounded(told)) > TEXT_MAX:
        raise RuntimeError("the text is longer than it may be")
    return told


def _identity() -> dict[str, str]:
    masters = (FirstMaster("flights-master-0", ID), FirstMaster("flights-master-1", "6" * 32))
    formed = {ID: "f1", "6" * 32: "f2"}
    return identity_data(
        Identity(
            "7", ID, "u-1", {"master": 2, "node": 5}, masters, formed, {"master": 0, "node": 0}, "8" * 32
        )
    )


def _parse_identity(data: bytes) -> object:
    """The API server vouches for a mapping of texts, and for nothing that stands in them."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    texts = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in raw.items()}
    with capture_logs():
        found = parse_identity(
            {"metadata": {"name": "flights-identity", "resourceVersion": "7"}, "data": texts}
        )
    more = found.with_more({"master": 1, "node": 1})
    return identity_data(more), [found.own_from(role) for role in ("master", "node")]

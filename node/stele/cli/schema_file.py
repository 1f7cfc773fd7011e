"""Table definitions from files or options. A file is a TabletGroup, its spec, or output of `stele table
describe --json`.

Does no I/O except to read the file. Invariants: all faults of a definition are reported together, each with its
line. Only fields that a server wrote are ignored.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stele.cli.document import Document, Entry, parse
from stele.model.bounds import HISTORY_DEFAULT_MS, HISTORY_MAX_MS, HISTORY_MIN_MS
from stele.model.column import Column
from stele.model.durations import seconds
from stele.model.errors import Rejected
from stele.model.ids import ColumnId, SchemaVersion
from stele.model.nearest import did_you_mean
from stele.model.notes import note_faults
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.ranges import of_ranges
from stele.model.schema import REPLICATION_FACTORS, Schema, column_faults_by_field
from stele.model.split_json import split_key


@dataclass(slots=True)
class TableDefinition:
    """The arguments of CreateTable. `unused`: fields of the file that only the operator reads."""

    name: str
    schema: Schema
    partitioning: PartitionSchema
    replication_factor: int = 3
    owner: str = ""
    comment: str = ""
    history_s: float | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Given:
    """A column of a definition. `column` is None if it has faults. Even then the parts that name it are checked."""

    id: int
    column: Column | None


Known = Mapping[str, _Given]
"""The columns by name."""
_EXPECTED = "expected a TabletGroup, or a mapping with columns and primaryKey"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""How `describe --json` prints numbers that are not finite."""
_API_VERSION = "stele.dev/v1alpha1"
_RESOURCE_KEYS = ("apiVersion", "kind", "metadata", "spec", "status")
_NOT_OURS = ("clusterRef", "deletionPolicy", "allowColumnDrop")
"""Fields of a TabletGroup that only the operator reads."""
DELETION_POLICIES = ("Retain", "Delete")
"""The values of `deletionPolicy` in the CustomResourceDefinition."""
_SPEC_KEYS = (
    *("name", "tableName", "replicationFactor", "columns", "primaryKey", "partitioning"),
    *("owner", "comment", "historyRetention"),
)
_DESCRIBED_KEYS = (
    "kind",
    "id",
    "state",
    "tablets",
    "tabletsRunning",
    "tabletsReady",
    "size",
    "load",
    "copies",
)
"""Fields of `describe --json` that are not part of the definition. A new table gets its own."""


def table_from_file(path: str) -> TableDefinition:
    """The definition in a file.

    Raises:
        Rejected: the file cannot be read, or its definition is wrong. The message lists every fault.
    """
    try:
        text = Path(path).read_text()
    except OSError as exc:
        raise Rejected(
            f"{path}: {exc.strerror}; name a YAML or JSON file, or give the columns with --column"
        ) from exc
    except UnicodeDecodeError as exc:
        raise Rejected(f"{path}: not valid YAML or JSON: {exc}") from exc
    document = parse(path, text)
    if not isinstance(document.value, dict):
        raise Rejected(f"{path}: {_EXPECTED}")
    _check_kind(path, document.root)
    if "spec" not in document.value:
        keys = (*_SPEC_KEYS, *_NOT_OURS, *_DESCRIBED_KEYS, "apiVersion")
        return _from_spec("", document.root, keys, path)
    resource = document.root.mapping(_RESOURCE_KEYS, required=("spec",))
    name = _name_of(resource["metadata"]) if "metadata" in resource else ""
    if "spec" not in resource:
        document.refuse_faults()
    return _from_spec(name, resource["spec"], (*_SPEC_KEYS, *_NOT_OURS), path)


def _check_kind(path: str, root: Entry) -> None:
    """Record a wrong kind or version. Raises Rejected for another kind, because its fields are others."""
    kind = root.get("kind")
    if kind is not None and kind.value not in ("TabletGroup", "table") and (word := kind.text("TabletGroup")):
        if word == "keyspace":
            kind.fault("a key space, not a table; create it with `stele kv create`")
        else:
            remedy = f"; create a {word} with `kubectl apply -f {path}`" if word == "TabletCluster" else ""
            kind.fault(f"{word}; {_EXPECTED}{remedy}")
        root.document.refuse_faults()
    version = root.get("apiVersion")
    if version is not None:
        version.one_of((_API_VERSION,))


def _name_of(metadata: Entry) -> str:
    """The name in a resource's metadata. The other fields there belong to Kubernetes."""
    if not isinstance(metadata.value, dict):
        metadata.fault("expected a mapping, as in a TabletGroup")
        return ""
    known = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")
    for key in metadata.value:
        if key not in known and (hint := did_you_mean(str(key), known)):
            metadata.document.fault((*metadata.place, str(key)), f"unknown key {key!r}{hint}")
    name = metadata.get("name")
    return name.text("a name") if name is not None else ""


def table_from_options(name: str, columns: Sequence[str], key: str, hashes: Sequence[str]) -> TableDefinition:
    """The definition in --column, --key and --hash. Raises Rejected with every fault."""
    spec: dict[str, Any] = {"columns": [], "primaryKey": [part for part in key.split(",") if part]}
    faults = []
    for text in columns:
        column, separator, kind = text.partition(":")
        if not separator or not column or not kind:
            faults.append(f"--column {text}: expected NAME:TYPE, like id:int64 or name:string?")
        spec["columns"].append(
            {"name": column, "type": kind.removesuffix("?"), "nullable": kind.endswith("?")}
        )
    known = {column["name"] for column in spec["columns"]}
    if not spec["primaryKey"]:
        faults.append("--key is missing; expected columns of the primary key, like id")
    for part in spec["primaryKey"]:
        if part not in known:
            faults.append(f"--key {key}: {_no_column(part, known)}")
    parts = hash_options(hashes, known, faults)
    where = f"table {name}"
    if faults:  # those of the columns belong to them
        document = Document(where, spec)
        for fault in faults:
            document.fault((), fault)
        each = document.root.mapping(spec)["columns"].entries("columns")
        whole = [entry for entry in each if entry.value["name"] and entry.value["type"]]
        _columns(whole, spec["primaryKey"])
        document.refuse_faults()
    spec["partitioning"] = {"hash": parts}
    return _from_spec(name, Document(where, spec).root, _SPEC_KEYS, where)


def hash_options(hashes: Sequence[str], known: set[str], faults: list[str]) -> list[dict[str, Any]]:
    """Parse each --hash; append what is wrong to `faults`."""
    parts = []
    for text in hashes:
        names, _, buckets = text.rpartition(":")
        if not names or not buckets.isdecimal():
            faults.append(f"--hash {text}: expected NAME,...:BUCKETS, like id:8")
            continue
        for unknown in (one for one in names.split(",") if one not in known):
            faults.append(f"--hash {text}: {_no_column(unknown, sorted(known))}")
        if int(buckets) < 2:
            faults.append(f"--hash {text}: {buckets} buckets; expected 2 or more")
        parts.append({"columns": names.split(","), "buckets": int(buckets)})
    return parts


def _from_spec(name: str, spec: Entry, keys: Sequence[str], where: str) -> TableDefinition:
    given = spec.mapping(keys, required=("columns", "primaryKey"))
    for field in ("name", "tableName"):
        if field in given:
            name = given[field].text("a name")
    factor = (
        given["replicationFactor"].one_of_numbers(REPLICATION_FACTORS) if "replicationFactor" in given else 3
    )
    entries = _filled(given["columns"], "columns") if "columns" in given else []
    primary = _filled(given["primaryKey"], "column names") if "primaryKey" in given else []
    known = _columns(entries, {entry.value for entry in primary if isinstance(entry.value, str)})
    key = _names(primary, known)
    partitioning = (
        _partitioning(given["partitioning"], known, key) if "partitioning" in given else PartitionSchema()
    )
    owner, comment = (_note(given[note], note) if note in given else "" for note in ("owner", "comment"))
    history_s = _history_s(given["historyRetention"]) if "historyRetention" in given else None
    unused = _checked_for_the_operator(given)
    spec.document.refuse_faults()
    columns = [each.column for each in known.values() if each.column is not None]
    try:
        schema = Schema.make([(c.name, c.type, c.nullable, c.default) for c in columns], key)
    except Rejected as exc:  # too many columns
        given["columns"].fault(str(exc.args[0]))
        spec.document.refuse_faults()
        raise
    return TableDefinition(
        name or Path(where).stem, schema, partitioning, factor, owner, comment, history_s, unused
    )


def _filled(entry: Entry, expected: str) -> list[Entry]:
    """The values of a list. An empty list is a fault."""
    if entry.value == []:
        entry.fault(f"an empty list; expected {expected}")
    return entry.entries(expected)


def _columns(entries: Sequence[Entry], primary: Collection[str]) -> dict[str, _Given]:
    """The columns of a definition by name; one without a name is left out. `primary`: the names in the key."""
    found: dict[str, _Given] = {}
    lower: set[str] = set()
    for n, entry in enumerate(entries):
        name, column = _column(n, entry, primary)
        if name and name.lower() in lower:
            entry.fault(f"column {name}: the name is used twice (case is ignored)")
        elif name:
            found[name] = _Given(n, column)
        lower.add(name.lower())
    return found


def _names(entries: Sequence[Entry], known: Known) -> list[str]:
    """Names of columns; one that is unknown or stands twice is a fault."""
    found: list[str] = []
    for entry in entries:
        name = entry.text("a column name")
        if name and known and name not in known:
            entry.fault(_no_column(name, known))
        elif name in found:
            entry.fault(f"column {name!r} is named twice; name it once")
        elif name:
            found.append(name)
    return found


def _no_column(name: str, known: Collection[str]) -> str:
    hint = did_you_mean(name, known) or f"; columns are {', '.join(known)}"
    return f"no column {name!r}{hint}"


def _note(entry: Entry, what: str) -> str:
    """A text that may be empty."""
    note = "" if entry.value == "" else entry.text()
    for fault in note_faults(note if what == "owner" else "", note if what == "comment" else ""):
        entry.fault(fault)
    return note


def _history_s(entry: Entry) -> float | None:
    """The history retention in seconds. The default is none, so that a cluster of any version takes it."""
    text = entry.text("a time, such as 90m or 7d")
    if not text:
        return None
    try:
        found = seconds(text)
    except ValueError as exc:
        entry.fault(str(exc))
        return None
    if not HISTORY_MIN_MS <= found * 1000 <= HISTORY_MAX_MS:
        entry.fault(f"{text}; expected 1 minute to 10 years, such as 90m or 7d")
    return None if found * 1000 == HISTORY_DEFAULT_MS else found


def _checked_for_the_operator(given: dict[str, Entry]) -> tuple[str, ...]:
    """Check the fields for the operator alone as Kubernetes checks them. They are not used here."""
    if "clusterRef" in given:
        cluster = given["clusterRef"].mapping(("name",), required=("name",))
        if "name" in cluster:
            cluster["name"].text("the name of a TabletCluster")
    if "deletionPolicy" in given:
        given["deletionPolicy"].one_of(DELETION_POLICIES)
    if "allowColumnDrop" in given:
        given["allowColumnDrop"].flag()
    return tuple(key for key in _NOT_OURS if key in given)


def _column(n: int, entry: Entry, primary: Collection[str]) -> tuple[str, Column | None]:
    """(name, column) of an entry; the column is None if the entry has faults. `primary`: the names in the key.

    A fault of one field does not hide those of others.
    """
    before = entry.document.faults
    known = ("name", "type", "nullable", "default", "id", "renamedFrom")
    given = entry.mapping(known, required=("name", "type"))
    if "renamedFrom" in given:  # of an existing table
        given["renamedFrom"].text("the column's earlier name")
    default = given["default"].scalar() if "default" in given else None
    name = given["name"].text("a name") if "name" in given else ""
    type_ = given["type"].text("a type, like int64") if "type" in given else ""
    flags = entry.document.faults
    nullable = given["nullable"].flag() if "nullable" in given else False
    unclear = {"nullable"} if entry.document.faults != flags else set()
    unclear |= {field for field, value in (("name", name), ("type", type_)) if not value}
    text = None if default is None else _as_json(default, type_)
    column = Column(ColumnId(n), name, type_, nullable, text)
    for field, fault in _faults_of(column, is_key=name in primary, unclear=unclear):
        (given.get(field) or entry).fault(fault)
    return name, column if entry.document.faults == before else None


def _faults_of(column: Column, *, is_key: bool, unclear: Collection[str]) -> list[tuple[str, str]]:
    """The faults of a column by field. `unclear`: fields that are missing or of another kind, told already."""
    stand_in = replace(
        column,
        name=column.name or "x",
        type=column.type or "int64",
        nullable=column.nullable or "nullable" in unclear,
    )
    if "type" in unclear:  # what its default should be is not known
        stand_in = replace(stand_in, default=None)
    faults = column_faults_by_field(stand_in, is_key=is_key and "nullable" not in unclear)
    if not any(field in ("type", "default") for field, _ in faults) and (said := stand_in.default_fault()):
        faults.append(("default", said))
    return [(field, said) for field, said in faults if field not in unclear]


def _as_json(default: Any, type_: str) -> str:
    if type_ in ("float", "double") and default in _NOT_FINITE:
        return str(default)
    return str(default) if isinstance(default, decimal.Decimal) else json.dumps(default)


def _partitioning(entry: Entry, known: Known, key: Sequence[str]) -> PartitionSchema:
    given = entry.mapping(("hash", "range"))
    schema = _stand_in(known, key)
    entries = given["hash"].entries("hashes") if "hash" in given else []
    hashes = [(part, each) for each in entries if (part := _hash(each, known)) is not None]
    range_ = _range(given["range"], known) if "range" in given else None
    found = PartitionSchema(tuple(part for part, _ in hashes), range_)
    if schema is None:
        return found
    told: set[str] = set()
    parts = [(PartitionSchema((part,)), each) for part, each in hashes]
    parts += [(PartitionSchema((), range_), given["range"])] if range_ is not None else []
    for some, each in parts:
        for fault in some.faults(schema):
            each.fault(fault.removeprefix("hash: ").removeprefix("range: "))
            told.add(fault)
    for fault in found.faults(schema):  # of several parts together
        if fault not in told:
            entry.fault(fault.removeprefix("hash: ").removeprefix("range: "))
    return found


def _stand_in(known: Known, key: Sequence[str]) -> Schema | None:
    """Make a schema with the names, ids and key of a definition whose types may be wrong. None if names or
    key are wrong."""
    if not key or not set(key) <= known.keys():
        return None
    columns = tuple(
        column
        if not column_faults_by_field(column, is_key=False)
        else replace(column, name=f"column_{column.id}")
        for column in (Column(ColumnId(each.id), name, "int64") for name, each in known.items())
    )
    ids = [column.id for column in columns]
    try:
        return Schema(
            SchemaVersion(1), columns, tuple(ColumnId(known[name].id) for name in key), max(ids) + 1
        )
    except Rejected:
        return None


def _hash(entry: Entry, known: Known) -> HashPartition | None:
    """Return the hash partition with those of its columns that are known. None if none is. Faults are added
    to the document."""
    given = entry.mapping(("columns", "buckets", "seed"), required=("columns", "buckets"))
    names = _names(given["columns"].entries("column names"), known) if "columns" in given else []
    buckets = given["buckets"].whole_number(2) if "buckets" in given else 2
    seed = given["seed"].whole_number(0) if "seed" in given else 0
    ids = tuple(known[name].id for name in names if name in known)
    none_named = "columns" in given and given["columns"].value == []
    return HashPartition(ids, buckets, seed) if ids or none_named else None


def _range(entry: Entry, known: Known) -> RangePartition | None:
    """Return the range partition with those of its columns that are known; None if none is. If it has faults,
    it has no splits."""
    before = entry.document.faults
    given = entry.mapping(("columns", "splitAt", "ranges"), required=("columns",))
    names = _names(given["columns"].entries("column names"), known) if "columns" in given else []
    if "ranges" in given and "splitAt" in given:
        entry.fault("it has splitAt and ranges; give one of them")
    ids = tuple(known[name].id for name in names if name in known)
    columns = [column for name in names if name in known and (column := known[name].column) is not None]
    found: RangePartition | None = RangePartition(ids)
    if names and len(columns) == len(names) == len(given["columns"].value):  # else values have no columns
        if "ranges" in given:
            found = _ranges(given["ranges"], columns, ids)
        splits = given["splitAt"].entries("values") if "splitAt" in given else []
        keys = tuple(_key(split, columns) for split in splits)
        found = RangePartition(ids, keys) if "ranges" not in given else found
    if entry.document.faults == before:
        return found
    return RangePartition(ids) if ids else None


def _ranges(entry: Entry, columns: list[Column], ids: tuple[int, ...]) -> RangePartition | None:
    before = entry.document.faults
    bounds = []
    for each in entry.entries("ranges"):
        ends = each.mapping(("from", "to"))
        found = [_key(ends[end], columns) if end in ends else b"" for end in ("from", "to")]
        bounds.append((found[0], found[1]))
    if entry.document.faults == before:
        try:
            return of_ranges(ids, bounds)
        except Rejected as exc:
            entry.fault(str(exc.args[0]).removeprefix("range: "))
    return None


def _key(entry: Entry, columns: list[Column]) -> bytes:
    """Return the key of a split or bound. What is wrong with it is added to the document's faults."""
    try:
        return split_key(entry.value, columns)
    except Rejected as exc:
        entry.fault(str(exc.args[0]))
        return b""

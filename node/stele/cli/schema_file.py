"""Table definitions from files or options. A file is a TabletGroup, its spec, or output of `stele table
describe --json`.

Does no I/O except to read the file. Invariants: all faults of a definition are reported together. Only fields
that a server wrote are ignored.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stele.cli.document import Document, Entry, parse
from stele.model.column import Column
from stele.model.durations import seconds
from stele.model.errors import Rejected
from stele.model.nearest import did_you_mean
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.ranges import of_ranges
from stele.model.schema import HISTORY_DEFAULT_MS, Schema
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


Known = Mapping[str, Column | None]
"""The columns by name; None if a definition has faults. So parts that name columns are checked all the
same."""
_EXPECTED = "expected a TabletGroup, or a mapping with columns and primaryKey"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""How `describe --json` prints them."""
_API_VERSION = "stele.dev/v1alpha1"
_RESOURCE_KEYS = ("apiVersion", "kind", "metadata", "spec", "status")
_NOT_OURS = ("clusterRef", "deletionPolicy", "allowColumnDrop")
"""Fields of a TabletGroup that only the operator reads."""
DELETION_POLICIES = ("Retain", "Delete")
"""As in the CustomResourceDefinition."""
_SPEC_KEYS = (
    *("name", "tableName", "replicationFactor", "columns", "primaryKey", "partitioning"),
    *("owner", "comment", "historyRetention"),
)
_DESCRIBED_KEYS = ("kind", "id", "state", "tablets", "tabletsRunning", "tabletsReady", "size")
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
    _check_kind(path, document.value)
    if "spec" not in document.value:
        keys = (*_SPEC_KEYS, *_NOT_OURS, *_DESCRIBED_KEYS, "apiVersion")
        return _from_spec("", document.root, keys, path)
    resource = document.root.mapping(_RESOURCE_KEYS, required=("spec",))
    name = _name_of(resource["metadata"]) if "metadata" in resource else ""
    if "spec" not in resource:
        document.refuse_faults()
    return _from_spec(name, resource["spec"], (*_SPEC_KEYS, *_NOT_OURS), path)


def _check_kind(path: str, document: dict[str, Any]) -> None:
    kind = document.get("kind", "TabletGroup")
    if kind == "keyspace":
        raise Rejected(f"{path}: a key space, not a table; create it with `stele kv create`")
    if kind not in ("TabletGroup", "table"):
        remedy = f"; create a {kind} with `kubectl apply -f {path}`" if kind == "TabletCluster" else ""
        raise Rejected(f"{path}: kind {kind}; {_EXPECTED}{remedy}")
    version = document.get("apiVersion", _API_VERSION)
    if version != _API_VERSION:
        raise Rejected(f"{path}: apiVersion {version}; expected {_API_VERSION}")


def _name_of(metadata: Entry) -> str:
    """The name in a resource's metadata. The other fields there belong to Kubernetes."""
    if not isinstance(metadata.value, dict):
        metadata.fault("expected a mapping, as in a TabletGroup")
        return ""
    known = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")
    for key in metadata.value:
        if key != "name" and key not in known and did_you_mean(str(key), known):
            metadata.fault(f"unknown key {key!r}{did_you_mean(str(key), known)}")
    name = metadata.value.get("name")
    return (
        Entry(metadata.document, (*metadata.place, "name"), name).text("a name") if name is not None else ""
    )


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
    parts = hash_options(hashes, known, faults)
    if faults:
        raise Rejected("; ".join(faults))
    spec["partitioning"] = {"hash": parts}
    where = f"table {name}"
    return _from_spec(name, Document(where, spec).root, _SPEC_KEYS, where)


def hash_options(hashes: Sequence[str], known: set[str], faults: list[str]) -> list[dict[str, Any]]:
    """Parse each --hash; append what is wrong to `faults`."""
    parts = []
    for text in hashes:
        names, _, buckets = text.rpartition(":")
        if not names or not buckets.isdecimal():
            faults.append(f"--hash {text}: expected NAME,...:BUCKETS, like id:8")
            continue
        if unknown := [one for one in names.split(",") if one not in known]:
            faults.append(f"--hash {text}: no column {', '.join(map(repr, unknown))}")
        if int(buckets) < 2:
            faults.append(f"--hash {text}: {buckets} buckets; expected 2 or more")
        parts.append({"columns": names.split(","), "buckets": int(buckets)})
    return parts


def _from_spec(name: str, spec: Entry, keys: Sequence[str], where: str) -> TableDefinition:
    given = spec.mapping(keys, required=("columns", "primaryKey"))
    for key in ("name", "tableName"):
        if key in given:
            name = given[key].text("a name")
    factor = given["replicationFactor"].whole_number(1) if "replicationFactor" in given else 3
    before = spec.document.faults
    columns = [_column(entry) for entry in given["columns"].entries("columns")] if "columns" in given else []
    primary = given["primaryKey"].texts("column names") if "primaryKey" in given else []
    is_whole = {"columns", "primaryKey"} <= given.keys() and spec.document.faults == before
    schema = _schema(spec, columns, primary) if is_whole else None
    known = schema.by_name if schema is not None else {str(column[0]): None for column in columns}
    partitioning = (
        _partitioning(given["partitioning"], known) if "partitioning" in given else PartitionSchema()
    )
    owner, comment = (_note(given[key]) if key in given else "" for key in ("owner", "comment"))
    history_s = _history_s(given["historyRetention"]) if "historyRetention" in given else None
    unused = _checked_for_the_operator(given)
    spec.document.refuse_faults()
    assert schema is not None
    faults = partitioning.faults(schema)
    if faults:
        raise Rejected(f"{where}: {'; '.join(faults)}")
    name = name or Path(where).stem
    return TableDefinition(name, schema, partitioning, factor, owner, comment, history_s, unused)


def _note(entry: Entry) -> str:
    """A text that may be empty."""
    return "" if entry.value == "" else entry.text()


def _history_s(entry: Entry) -> float | None:
    """The history retention in seconds. The default is none, so that a cluster of any version takes it."""
    text = entry.text("a time, such as 90m or 7d")
    try:
        found = seconds(text) if text else 0.0
    except ValueError as exc:
        entry.fault(str(exc))
        return None
    return None if found * 1000 == HISTORY_DEFAULT_MS else found


def _schema(spec: Entry, columns: list[tuple[Any, ...]], primary: list[str]) -> Schema | None:
    """The schema; what is wrong with it is a fault of the document."""
    try:
        return Schema.make(columns, primary)
    except Rejected as exc:
        spec.document.fault((), str(exc.args[0]))
        return None


def _checked_for_the_operator(given: dict[str, Entry]) -> tuple[str, ...]:
    """Fields for the operator alone: not used here, but checked as Kubernetes checks them."""
    if "clusterRef" in given:
        cluster = given["clusterRef"].mapping(("name",), required=("name",))
        if "name" in cluster:
            cluster["name"].text("the name of a TabletCluster")
    if "deletionPolicy" in given:
        given["deletionPolicy"].one_of(DELETION_POLICIES)
    if "allowColumnDrop" in given:
        given["allowColumnDrop"].flag()
    return tuple(key for key in _NOT_OURS if key in given)


def _column(entry: Entry) -> tuple[Any, ...]:
    known = ("name", "type", "nullable", "default", "id", "renamedFrom")
    given = entry.mapping(known, required=("name", "type"))
    if "renamedFrom" in given:  # of an existing table
        given["renamedFrom"].text("the column's earlier name")
    default = given["default"].scalar() if "default" in given else None
    type_ = given["type"].text("a type, like int64") if "type" in given else ""
    return (
        given["name"].text("a name") if "name" in given else "",
        type_,
        given["nullable"].flag() if "nullable" in given else False,
        None if default is None else _as_json(default, type_),
    )


def _as_json(default: Any, type_: str) -> str:
    if type_ in ("float", "double") and default in _NOT_FINITE:
        return str(default)
    return str(default) if isinstance(default, decimal.Decimal) else json.dumps(default)


def _partitioning(entry: Entry, known: Known) -> PartitionSchema:
    given = entry.mapping(("hash", "range"))
    hashes = [_hash(part, known) for part in given["hash"].entries("hashes")] if "hash" in given else []
    range_ = _range(given["range"], known) if "range" in given else None
    return PartitionSchema(tuple(hashes), range_)


def _hash(entry: Entry, known: Known) -> HashPartition:
    given = entry.mapping(("columns", "buckets", "seed"), required=("columns", "buckets"))
    columns = _named_columns(given["columns"], known) if "columns" in given else []
    buckets = given["buckets"].whole_number(2) if "buckets" in given else 2
    seed = given["seed"].whole_number(0) if "seed" in given else 0
    return HashPartition(tuple(int(column.id) for column in columns), buckets, seed)


def _range(entry: Entry, known: Known) -> RangePartition:
    given = entry.mapping(("columns", "splitAt", "ranges"), required=("columns",))
    columns = _named_columns(given["columns"], known) if "columns" in given else []
    ids = tuple(int(column.id) for column in columns)
    if "ranges" in given and "splitAt" in given:
        entry.fault("it has splitAt and ranges; give one of them")
    elif "ranges" in given and columns:
        return _ranges(given["ranges"], columns, ids)
    keys = []
    for split in given["splitAt"].entries("values") if "splitAt" in given and columns else ():
        keys.append(_key(split, columns))
    return RangePartition(ids, tuple(keys))


def _ranges(entry: Entry, columns: list[Column], ids: tuple[int, ...]) -> RangePartition:
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
    return RangePartition(ids)


def _key(entry: Entry, columns: list[Column]) -> bytes:
    """The key of a split or bound. What is wrong with it is a fault of the document."""
    try:
        return split_key(entry.value, columns)
    except Rejected as exc:
        entry.fault(str(exc.args[0]))
        return b""


def _named_columns(entry: Entry, known: Known) -> list[Column]:
    found = []
    for each in entry.entries("column names"):
        name = each.text("a column name")
        column = known.get(name)
        if column is not None:
            found.append(column)
        elif name and known and name not in known:
            hint = did_you_mean(name, known) or f"; columns are {', '.join(known)}"
            each.fault(f"no column {name!r}{hint}")
    return found

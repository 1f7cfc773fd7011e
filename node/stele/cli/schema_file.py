"""Table definitions from files (YAML or JSON, a TabletGroup or only its spec) and from options. Pure, but for the file.

Invariant: all faults of a definition are told together.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stele.model.errors import Rejected
from stele.model.jsons import too_deep
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema


@dataclass(slots=True)
class TableDefinition:
    """What CreateTable wants to know."""

    name: str
    schema: Schema
    partitioning: PartitionSchema
    replication_factor: int = 3


_EXPECTED = "expected a TabletGroup, or a mapping with columns and primaryKey"


class _Loader(yaml.SafeLoader):
    """Reads numbers with a point as they stand there: whether they fit their column is not for a float to say."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> decimal.Decimal | float:
    try:
        return decimal.Decimal(loader.construct_scalar(node))
    except decimal.InvalidOperation:  # .inf and .nan
        return loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def _as_json(default: Any) -> str:
    return str(default) if isinstance(default, decimal.Decimal) else json.dumps(default)


def table_from_file(path: str) -> TableDefinition:
    """The definition in a file.

    Raises:
        Rejected: the file cannot be read, or with every fault of what it says.
    """
    try:
        text = Path(path).read_text()
    except OSError as exc:
        raise Rejected(
            f"{path}: {exc.strerror}; name a YAML or JSON file, or give the columns with --column"
        ) from exc
    except UnicodeDecodeError as exc:
        raise Rejected(f"{path}: no YAML or JSON: {exc}") from exc
    try:
        document = yaml.load(text, _Loader)
    except (
        yaml.YAMLError,
        ValueError,
    ) as exc:  # ValueError: a number of thousands of digits, a date that is none
        raise Rejected(f"{path}: no YAML or JSON: {str(exc).splitlines()[0]}") from exc
    except RecursionError:
        raise Rejected(f"{path}: no YAML or JSON: {too_deep()}") from None
    if not isinstance(document, dict):
        raise Rejected(f"{path}: {_EXPECTED}")
    if (kind := document.get("kind", "TabletGroup")) != "TabletGroup":
        remedy = f"; a {kind} is made with `kubectl apply -f {path}`" if kind == "TabletCluster" else ""
        raise Rejected(f"{path}: kind {kind}; {_EXPECTED}{remedy}")
    spec = document.get("spec", document)
    metadata = document.get("metadata") or {}
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        raise Rejected(f"{path}: expected mappings below spec and metadata, as in a TabletGroup")
    name = spec.get("tableName") or spec.get("name") or metadata.get("name") or Path(path).stem
    return _from_spec(str(name), spec, path)


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
    parts, known = [], {column["name"] for column in spec["columns"]}
    for text in hashes:
        names, _, buckets = text.rpartition(":")
        if not names or not buckets.isdecimal():
            faults.append(f"--hash {text}: expected NAME,...:BUCKETS, like id:8")
            continue
        if unknown := [one for one in names.split(",") if one not in known]:
            faults.append(f"--hash {text}: {', '.join(map(repr, unknown))} is no --column")
        parts.append({"columns": names.split(","), "buckets": int(buckets)})
    if faults:
        raise Rejected("; ".join(faults))
    spec["partitioning"] = {"hash": parts}
    return _from_spec(name, spec, f"table {name}")


def _from_spec(name: str, spec: dict[str, Any], where: str) -> TableDefinition:
    try:
        schema = Schema.make(
            [
                (
                    column["name"],
                    column["type"],
                    bool(column.get("nullable", False)),
                    None if column.get("default") is None else _as_json(column["default"]),
                )
                for column in spec["columns"]
            ],
            spec["primaryKey"],
        )
        ids = {column.name: int(column.id) for column in schema.columns}
        partitioning = PartitionSchema(
            tuple(
                HashPartition(tuple(ids[n] for n in part["columns"]), int(part["buckets"]))
                for part in (spec.get("partitioning") or {}).get("hash", ())
            )
        )
        replication_factor = int(spec.get("replicationFactor", 3))
    except Rejected as exc:
        raise Rejected(f"{where}: {exc.args[0]}") from None
    except KeyError as exc:
        raise Rejected(f"{where}: {exc.args[0]!r} is missing, or names no column") from None
    except (TypeError, ValueError, AttributeError) as exc:
        raise Rejected(f"{where}: {exc}; expected the spec of a TabletGroup") from None
    faults = partitioning.faults(schema)
    if faults:
        raise Rejected(f"{where}: {'; '.join(faults)}")
    return TableDefinition(name, schema, partitioning, replication_factor)

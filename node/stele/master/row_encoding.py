"""Rows of the catalog as bytes. Used by the catalog and by everything that proposes; opens nothing.

A row is a version byte and compact JSON, with fields in declaration order. An older program ignores a new field and writes it
back unchanged. So a row may be shorter or longer than what this program writes; compare rows by the bytes that were read
(`Row.stored`). Older programs end at a row of a higher VERSION. Which changes must raise it: see records.py.

Invariant: an unknown version is refused, and an unknown field is kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from sys import intern
from typing import Any, TypeVar

from stele.master.records import (
    ClaimRecord,
    ClusterRecord,
    IntentRecord,
    NodeRecord,
    PolicyRecord,
    RecoveryRecord,
    Row,
    TableRecord,
    TabletRecord,
)
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration, decode_configuration, encode_configuration
from stele.model.copies import CopyRecord
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import OpId
from stele.model.jsons import parse_json
from stele.model.partition import Partition

VERSION = 1

R = TypeVar(
    "R",
    ClusterRecord,
    TableRecord,
    TabletRecord,
    NodeRecord,
    IntentRecord,
    ClaimRecord,
    PolicyRecord,
    RecoveryRecord,
)


def _partition(buckets: list[int], start: str, end: str) -> Partition:
    return Partition(tuple(buckets), bytes.fromhex(start), bytes.fromhex(end))


def _by_hand(raw: list[Any]) -> ByHand:
    if not raw:
        return NOT_BY_HAND
    pinned, avoided, extra, owner, reason, since_us = raw
    return ByHand(
        tuple(map(str, pinned)), tuple(map(str, avoided)), int(extra), str(owner), str(reason), int(since_us)
    )


def _same(value: Any) -> Any:
    return value


def _copy_to_json(c: CopyRecord) -> list[Any]:
    """The JSON of a comparison record. It is as short as possible, since each tablet may have one."""
    if c.waits:
        return [c.replica_id, c.cause]
    told = [c.replica_id, c.cause, c.other_id, c.at_us, c.snapshot, c.index, c.rows, c.checksum]
    return told if c.equal else [*told, c.other_rows, c.other_checksum]


def _copy_from_json(raw: list[Any]) -> CopyRecord:
    replica_id, cause, *numbers = raw
    if len(numbers) == 6:
        numbers += numbers[-2:]
    return CopyRecord(int(replica_id), str(cause), *map(int, numbers))


_TO_JSON: dict[type, Callable[[Any], Any]] = {
    Configuration: lambda c: encode_configuration(c).hex(),
    Partition: lambda p: [list(p.hash_buckets), p.range_start.hex(), p.range_end.hex()],
    OpId: lambda o: [o.term, o.index],
    ByHand: lambda h: (
        [list(h.pinned), list(h.avoided), h.extra, h.owner, h.reason, h.since_us] if h != NOT_BY_HAND else []
    ),
    CopyRecord: _copy_to_json,
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    # Thousands of rows say the same words, so each is kept once.
    **dict.fromkeys(
        ("tablet_id", "table_id", "node_id", "leader", "state", "target_node", "source_node"), intern
    ),
    "config": lambda raw: decode_configuration(bytes.fromhex(raw)),
    "partition": lambda raw: _partition(*raw),
    "config_before": lambda raw: decode_configuration(bytes.fromhex(raw)),
    "witness_start": lambda raw: OpId(*map(int, raw)),
    "last_logged": lambda raw: OpId(*map(int, raw)),
    "uncreated": lambda raw: tuple(int(r) for r in raw),
    "by_hand": _by_hand,
    "copies": lambda raw: tuple(map(_copy_from_json, raw)),
    "holders": lambda raw: tuple(str(node_id) for node_id in raw),
    "holding": lambda raw: tuple((str(name), tuple((str(n), int(i)) for n, i in away)) for name, away in raw),
    "waiting": lambda raw: tuple(map(str, raw)),
}
_BESIDE = {f.name for f in dataclasses.fields(Row)}
_FIELDS: dict[type, tuple[tuple[str, Callable[[Any], Any]], ...]] = {
    kind: tuple(
        (f.name, _FROM_JSON.get(f.name, _same)) for f in dataclasses.fields(kind) if f.name not in _BESIDE
    )
    for kind in (
        *(ClusterRecord, TableRecord, TabletRecord, NodeRecord, IntentRecord, ClaimRecord),
        *(PolicyRecord, RecoveryRecord),
    )
}
"""The decoder from JSON of each field, by the field's name."""


def encode(record: Row) -> bytes:
    """The bytes of a record's row. Values that only a later release knows come last."""
    values = [_plain(getattr(record, name)) for name, _ in _FIELDS[type(record)]]
    values += record.surplus
    return (
        bytes([_version_of(record)]) + json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode()
    )


def _version_of(record: Row) -> int:
    return max(VERSION, record.cluster_version) if isinstance(record, ClusterRecord) else VERSION


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return [_plain(each) for each in value]
    convert = _TO_JSON.get(type(value))
    return convert(value) if convert is not None else value


def stored(record: Row) -> bytes:
    """The bytes of a record's row as they stand in the key space."""
    return record.stored if record.stored is not None else encode(record)


def decode(kind: type[R], data: bytes) -> R:
    """The record of a row.

    Raises:
        Rejected: UNSUPPORTED_VERSION, a version or value that only a later release knows.
        Corrupt: the bytes are not a row.
    """
    version = data[0] if data else 0
    newest = CLUSTER_VERSION if kind is ClusterRecord else VERSION
    if version > newest:
        raise _later(kind, f"version {version}, but this program reads up to version {newest}")
    try:
        if version < VERSION:
            raise ValueError(f"version {version}")
        values = parse_json(data[1:])
    except ValueError as exc:
        raise Corrupt(f"catalog row {kind.__name__}: {exc}; expected what encode wrote") from exc
    fields = _FIELDS[kind]
    try:
        if not isinstance(values, list):
            raise TypeError(f"a {type(values).__name__}; expected a list")
        known = {name: convert(value) for (name, convert), value in zip(fields, values, strict=False)}
        record = kind(**known, surplus=tuple(values[len(fields) :]))
    except (ValueError, TypeError) as exc:
        raise _later(kind, f"it has values that this release does not know ({exc})") from exc
    object.__setattr__(record, "stored", data)  # the class is frozen
    return record


def _later(kind: type[Any], why: str) -> Rejected:
    return Rejected(
        f"catalog row {kind.__name__}: {why}; upgrade this program", code=Code.UNSUPPORTED_VERSION
    )

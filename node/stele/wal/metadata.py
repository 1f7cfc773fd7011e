"""The consensus metadata: one small file that checkpoints the hard state of all streams, and a copy of it.

Each file is written under another name, synced, renamed, and its directory synced: first `metadata`, then
`metadata.copy`. Only then may segments that hold the same states be removed. Called by log.py, collect.py and
recovery.py.
Invariant: each file holds the term, vote, start, configuration and tombstones that all records before its
position say. All of it was durable when the file was written. `metadata` is never older than its copy.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import structlog

from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId, StreamKey, TabletId
from stele.model.jsons import parse_json
from stele.wal.files import Files
from stele.wal.sectors import read_or_corrupt
from stele.wal.state import HardState, Saved

METADATA = "metadata"
COPY = "metadata.copy"
_log = structlog.get_logger("stele.wal")
_MAGIC = b"STELMETA"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")


@dataclass(frozen=True, slots=True)
class Position:
    """A synced place between two groups."""

    sequence: int
    offset: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """`first_sequence`: the lowest segment still needed. `collected_id`: the id of the segment before it, 0
    if none was collected. `position`: the place up to which the streams' states are complete."""

    node_id: NodeId
    first_sequence: int
    collected_id: int
    position: Position
    streams: tuple[Saved, ...]


def encode_metadata(metadata: Metadata) -> bytes:
    """The metadata as the bytes of a file."""
    p = metadata.position
    value = {
        "node_id": metadata.node_id,
        "first_sequence": metadata.first_sequence,
        "collected_id": metadata.collected_id,
        "position": [p.sequence, p.offset],
        "streams": [
            [
                s.key.tablet_id,
                s.key.replica_id,
                s.hard.term,
                s.hard.voted_for,
                int(s.hard.promoted),
                s.start.term,
                s.start.index,
                base64.b64encode(s.config).decode(),
                s.last.term,
                s.last.index,
                int(s.tombstoned),
                s.damaged_at,
                s.created,
            ]
            for s in metadata.streams
        ],
    }
    body = json.dumps(value, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, _VERSION, google_crc32c.value(body), len(body)) + body


def decode_metadata(data: bytes, where: str) -> Metadata:
    """The inverse of `encode_metadata`.

    Raises:
        Corrupt: the bytes are damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        magic, version, crc, length = _HEADER.unpack_from(data)
    except struct.error as exc:
        raise Corrupt(f"{where}: {len(data)} bytes; expected a header of {_HEADER.size}") from exc
    body = data[_HEADER.size :]
    if magic != _MAGIC or (version == _VERSION and (length != len(body) or google_crc32c.value(body) != crc)):
        raise Corrupt(f"{where}: the checksum is wrong; the file is damaged")
    if version != _VERSION:
        raise Rejected(
            f"{where}: version {version} is unknown; this program reads {_VERSION}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    try:
        return _parse(parse_json(body))
    except (ValueError, TypeError, KeyError) as exc:
        raise Corrupt(f"{where}: {exc!r}; the file is damaged") from exc


def _parse(value: Any) -> Metadata:
    return Metadata(
        NodeId(value["node_id"]),
        int(value["first_sequence"]),
        int(value["collected_id"]),
        Position(*map(int, value["position"])),
        tuple(
            Saved(
                StreamKey(TabletId(tablet), ReplicaId(replica)),
                HardState(term, None if vote is None else ReplicaId(vote), bool(promoted)),
                OpId(start_term, start_index),
                base64.b64decode(config),
                OpId(last_term, last_index),
                bool(tombstoned),
                int(damaged_at),
                created,
            )
            for (
                tablet,
                replica,
                term,
                vote,
                promoted,
                start_term,
                start_index,
                config,
                last_term,
                last_index,
                tombstoned,
                damaged_at,
                created,
            ) in value["streams"]
        ),
    )


@dataclass(frozen=True, slots=True)
class FoundMetadata:
    """What the two files say. `metadata`: the newest whole one; None if there is no file.

    `faults`: (file name, why it must be rewritten) for each file that does not hold the newest content."""

    metadata: Metadata | None
    faults: tuple[tuple[str, str], ...]


def write_metadata(files: Files, directory: Path, metadata: Metadata) -> None:
    """Replace both files. On return both survive power loss."""
    for name in (METADATA, COPY):
        _replace(files, directory, name, metadata)


def _replace(files: Files, directory: Path, name: str, metadata: Metadata) -> None:
    temporary = directory / f"{name}.new"
    file = files.create(temporary)
    try:
        file.write([encode_metadata(metadata)], 0)
        file.full_sync()
    finally:
        file.close()
    files.rename(temporary, directory / name)
    files.sync_directory(directory)


def read_metadata(files: Files, directory: Path) -> FoundMetadata:
    """Read both files. Writes nothing.

    If only the copy is whole, it may be older than the lost file. It is one write older, or more if a release
    without a copy ran meanwhile. Then either the log still holds all records after its position, or the
    streams that miss some are FAILED.

    Raises:
        Corrupt, Rejected: neither file is whole; see `decode_metadata`. Corrupt also for bad sectors.
    """
    first, first_error = _read(files, directory / METADATA)
    copy, copy_error = _read(files, directory / COPY)
    newest = first if first is not None else copy
    if newest is None:
        error = first_error or copy_error
        if error is not None:
            raise error
        return FoundMetadata(None, ())
    faults = []
    for name, found, found_error in ((METADATA, first, first_error), (COPY, copy, copy_error)):
        if found_error is not None:
            faults.append((name, str(found_error)))
        elif found is None:
            faults.append((name, "it is missing"))
        elif found != newest:
            faults.append((name, "it is older than the other"))
    return FoundMetadata(newest, tuple(faults))


def mend_metadata(files: Files, directory: Path, found: FoundMetadata) -> None:
    """Rewrite each file that does not hold the newest content. If the disk refuses, the next write tries
    again."""
    for name, fault in found.faults:
        assert found.metadata is not None
        if (name, fault) == (COPY, "it is missing"):
            # Normal after an upgrade from a release that kept one file.
            _log.info("writing the first copy of the metadata", file=name)
        else:
            _log.warning(
                "a metadata file was damaged; rewriting it from the other one", file=name, fault=fault
            )
        try:
            _replace(files, directory, name, found.metadata)
        except OSError as exc:
            _log.warning(
                "cannot rewrite the metadata file; the next checkpoint tries again", file=name, error=str(exc)
            )


def _read(files: Files, path: Path) -> tuple[Metadata | None, Corrupt | Rejected | None]:
    """A file's content, or why it cannot be used. Both None if there is no file."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None, None
    try:
        data = read_or_corrupt(file, file.length(), 0, str(path))
        return decode_metadata(data, str(path)), None
    except (Corrupt, Rejected) as exc:
        return None, exc
    finally:
        file.close()

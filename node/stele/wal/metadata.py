"""The consensus metadata: one small file for the whole log, the checkpoint of every stream's hard state, and its copy.

Each is written aside, synced, renamed, directory synced: first `metadata`, then `metadata.copy`, then the segments that
hold the same go. Called by log.py, collect.py and recovery.py. Invariant: each holds all that records before its position
said of term, vote, start, configuration and tombstones, and nothing that was not durable when it was written. `metadata`
is never older than its copy.
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
    """A place between two groups, that was synced."""

    sequence: int
    offset: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """`first_sequence`: the lowest segment that is still needed; `collected_id`: the segment before it, 0 if none was
    collected; `position`: what the streams' states cover."""

    node_id: NodeId
    first_sequence: int
    collected_id: int
    position: Position
    streams: tuple[Saved, ...]


def encode_metadata(metadata: Metadata) -> bytes:
    """The file's bytes."""
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
        Corrupt: other bytes than were written.
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        magic, version, crc, length = _HEADER.unpack_from(data)
    except struct.error as exc:
        raise Corrupt(f"{where}: {len(data)} bytes; expected a header of {_HEADER.size}") from exc
    body = data[_HEADER.size :]
    if magic != _MAGIC or (version == _VERSION and (length != len(body) or google_crc32c.value(body) != crc)):
        raise Corrupt(f"{where}: the checksum does not fit its bytes; the file is damaged")
    if version != _VERSION:
        raise Rejected(
            f"{where}: version {version} is unknown, this program reads {_VERSION}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    try:
        return _parse(parse_json(body))
    except (ValueError, TypeError, KeyError) as exc:
        raise Corrupt(f"{where}: {exc!r}; expected what encode_metadata wrote") from exc


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
    """What the two files say. `metadata`: the newest whole one, None if there is no file. `faults`: (file name, why it has
    to be written anew), for each that does not hold the same."""

    metadata: Metadata | None
    faults: tuple[tuple[str, str], ...]


def write_metadata(files: Files, directory: Path, metadata: Metadata) -> None:
    """Replace both files; on return both survive power loss."""
    for name in (METADATA, COPY):
        _replace(files, directory, name, metadata)


def _replace(files: Files, directory: Path, name: str, metadata: Metadata) -> None:
    aside = directory / f"{name}.new"
    file = files.create(aside)
    try:
        file.write([encode_metadata(metadata)], 0)
        file.full_sync()
    finally:
        file.close()
    files.rename(aside, directory / name)
    files.sync_directory(directory)


def read_metadata(files: Files, directory: Path) -> FoundMetadata:
    """The files' content. Writes nothing.

    A copy that stands in may be older than the file was, by one write, or by more if a release that knows no copy ran
    meanwhile. Then the log still has all that came behind its position, or the streams that lack something are FAILED.

    Raises:
        Corrupt, Rejected: as `decode_metadata`, and for bad sectors, where neither file is whole.
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
    """Write anew what does not hold the newest. A disk that does not take it has its next chance at the next write."""
    for name, fault in found.faults:
        assert found.metadata is not None
        if (name, fault) == (COPY, "it is missing"):
            _log.info(
                "metadata gets a copy", file=name
            )  # as after an upgrade from a release that kept one file
        else:
            _log.warning(
                "metadata was damaged and is written anew from the other file", file=name, fault=fault
            )
        try:
            _replace(files, directory, name, found.metadata)
        except OSError as exc:
            _log.warning("metadata not written anew", file=name, error=str(exc))


def _read(files: Files, path: Path) -> tuple[Metadata | None, Corrupt | Rejected | None]:
    """A file's content, or why it has none; neither if there is no file."""
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

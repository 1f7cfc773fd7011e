"""The consensus metadata: one small file for the whole log, the checkpoint of every stream's hard state.

Written aside, synced, renamed, directory synced, before the segments that hold the same go. Called by log.py and
recovery.py. Invariant: it holds all that records before its position said of term, vote, start, configuration and
tombstones, and nothing that was not durable when it was written.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId, StreamKey, TabletId
from stele.model.jsons import parse_json
from stele.wal.files import Files
from stele.wal.state import HardState, Saved

METADATA = "metadata"
_ASIDE = "metadata.new"
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


def write_metadata(files: Files, directory: Path, metadata: Metadata) -> None:
    """Replace the file; on return it survives power loss."""
    aside = directory / _ASIDE
    file = files.create(aside)
    try:
        file.write([encode_metadata(metadata)], 0)
        file.full_sync()
    finally:
        file.close()
    files.rename(aside, directory / METADATA)
    files.sync_directory(directory)


def read_metadata(files: Files, directory: Path) -> Metadata | None:
    """The file's content, None if there is no file.

    Raises:
        Corrupt, Rejected: as `decode_metadata`.
    """
    path = directory / METADATA
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(file.length(), 0)
    finally:
        file.close()
    return decode_metadata(data, str(path))

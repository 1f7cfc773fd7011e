"""The manifest: the files of a store and the OpId that they hold. Replaced atomically and synced with its
directory.

Called by store.py. Invariant: a file that the manifest on disk lists exists and is synced, with its name. A
file that it does not list is a leftover and may be removed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from stele.model.errors import Corrupt, Rejected, of_later_program
from stele.model.holds import NONE_HELD, Held, Hold
from stele.model.ids import OPID_NONE, OpId
from stele.model.jsons import parse_json
from stele.model.schema import Schema
from stele.tablet.checked import read_sealed, seal
from stele.tablet.colformat import FileMeta, file_name
from stele.tablet.files import Files

NAME = "MANIFEST"
TEMPORARY = "MANIFEST.tmp"
ONCE = "once-"
"""Prefix of the names of files with exactly-once state."""
_MAGIC = b"STLMANIF"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """A store's durable state. `files` are newest first. `once`: name of the exactly-once state file, "" for
    none yet.

    `once_size` and `once_crc` (CRC-32C of its bytes) tie that name to one file; None if an earlier release
    wrote it. `next_file` numbers the next new file. `history_mark`: versions that only snapshots below it see
    may be gone. `held`: the holds on history at the OpId."""

    schemas: tuple[Schema, ...]
    opid: OpId = OPID_NONE
    max_ceiling: int = 0
    last_timestamp: int = 0
    history_mark: int = 0
    next_file: int = 1
    once: str = ""
    once_size: int = 0
    once_crc: int | None = None
    files: tuple[FileMeta, ...] = ()
    held: Held = NONE_HELD

    @property
    def schema(self) -> Schema:
        """The newest schema."""
        return self.schemas[-1]

    def file_names(self) -> tuple[str, ...]:
        """The names of all files that this manifest lists."""
        return tuple(f.name for f in self.files) + ((self.once,) if self.once else ())


def write(files: Files, directory: Path, manifest: Manifest) -> None:
    """Make `manifest` durable as the directory's manifest. The files that it lists must be synced.

    Their names are synced here, before the manifest gets its own name: a file system may lose names in any
    order.

    Raises:
        Retryable: DISK_FULL; the old manifest stays.
        Corrupt: IO_ERROR.
    """
    body = {
        "schemas": [json.loads(s.to_json()) for s in manifest.schemas],
        "opid": [manifest.opid.term, manifest.opid.index],
        "max_ceiling": manifest.max_ceiling,
        "last_timestamp": manifest.last_timestamp,
        "history_mark": manifest.history_mark,
        "next_file": manifest.next_file,
        "once": manifest.once,
        "once_size": manifest.once_size,
        "once_crc": manifest.once_crc,
        "files": [f.to_json() for f in manifest.files],
    }
    if manifest.held.holds:  # releases before holds read every other manifest
        body["holds"] = [hold.to_json() for hold in manifest.held.holds]
    data = seal(_MAGIC, _VERSION, json.dumps(body, separators=(",", ":")).encode())
    files.write_new(directory / TEMPORARY, [data])
    files.sync_directory(directory)
    files.replace(directory / TEMPORARY, directory / NAME)


def read(directory: Path) -> Manifest:
    """The directory's manifest.

    Raises:
        Corrupt: the file is missing or damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    sealed = read_sealed(directory / NAME, _MAGIC, _VERSION)
    try:
        raw = parse_json(sealed)
        once_crc = raw.get("once_crc")
        schemas = tuple(Schema.from_json(json.dumps(s)) for s in raw["schemas"])
        if not schemas:
            raise ValueError("no schema")
        return Manifest(
            schemas,
            OpId(int(raw["opid"][0]), int(raw["opid"][1])),
            int(raw["max_ceiling"]),
            int(raw["last_timestamp"]),
            int(raw["history_mark"]),
            int(raw["next_file"]),
            file_name(raw["once"], ONCE) if raw["once"] else "",
            int(raw.get("once_size", 0)),
            None if once_crc is None else int(once_crc),
            tuple(FileMeta.from_json(f) for f in raw["files"]),
            Held(tuple(Hold.from_json(each) for each in raw.get("holds", ()))),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, Rejected) as exc:
        if of_later_program(exc):
            raise
        raise Corrupt(f"{NAME}: {exc!r}; the manifest is damaged; copy the replica from a peer") from exc


def remove_debris(files: Files, directory: Path, manifest: Manifest) -> list[str]:
    """Remove files that a crash left behind. Returns their names."""
    listed = {NAME, *manifest.file_names()}
    debris = [p for p in sorted(directory.iterdir()) if p.name not in listed and p.is_file()]
    for path in debris:
        files.remove(path)
    return [p.name for p in debris]


def without(manifest: Manifest, names: set[str]) -> tuple[FileMeta, ...]:
    """The files, without those named."""
    return tuple(f for f in manifest.files if f.name not in names)


__all__ = ["NAME", "Manifest", "read", "remove_debris", "replace", "without", "write"]

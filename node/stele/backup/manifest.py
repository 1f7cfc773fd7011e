"""What a backup holds, as `manifest.json` says it. Opens no files.

A manifest is sealed: its text carries the SHA-256 of its content, so a cut or changed one is never believed. The plan of
a backup that is not finished has the same form, without files. docs/backup.md describes the format.

Invariant: what `Manifest.of` returns names only files inside the backup's own folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Corrupt, Rejected, SteleError, unknown_here
from stele.model.jsons import parse_json, whole_number
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema

MANIFEST, PLAN = "manifest.json", "plan.json"
VERSION = 1
BACKUP_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_U64_MAX = (1 << 64) - 1
_COUNT_MAX = (1 << 63) - 1
FILE_BYTES_MAX = 1 << 31
"""The most bytes of a file, since a restore reads a file whole. No file that this program writes comes
near."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A Parquet file with rows of one tablet, in key order. `sha256`: of its bytes, in hex."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TabletEntry:
    """A tablet. `ordinal`: its number in the table's partitioning. Its files are in key order, one after another.

    `whole`: the files have all its rows; otherwise only what changed since the base. `incarnation`: of the tablet; a recovery may have
    given up rows that an earlier one had."""

    tablet_id: str
    ordinal: int
    files: tuple[FileEntry, ...] = ()
    incarnation: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table as it was. `folder`: the folder of its files, within the backup's folder."""

    name: str
    table_id: str
    folder: str
    schema: Schema
    partitioning: PartitionSchema
    replication_factor: int
    tablets: tuple[TabletEntry, ...]
    owner: str = ""
    comment: str = ""

    @property
    def files(self) -> list[FileEntry]:
        """The files of all tablets."""
        return [file for tablet in self.tablets for file in tablet.files]

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(file.rows for file in self.files)

    @property
    def file_bytes(self) -> int:
        """The number of bytes of its files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Base:
    """The backup that an incremental one builds on. `sha256`: the checksum of its content."""

    backup_id: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A backup: the rows of all its tables at one `snapshot`, a hybrid time. `base`: None for a full one.

    `begun`, `finished`: when it was made, in UTC; `finished` is None in a plan. `program`: what wrote it.
    `hold`: the hold that keeps the history from the snapshot on, for the next incremental backup; "" for none.
    `key`: the caller's own name for it; "" for none.
    """

    backup_id: str
    cluster_id: str
    snapshot: int
    begun: datetime
    finished: datetime | None
    program: str
    tables: tuple[TableEntry, ...]
    base: Base | None = None
    hold: str = ""
    key: str = ""

    @property
    def kind(self) -> str:
        """What it is: "full" or "incremental"."""
        return "full" if self.base is None else "incremental"

    @property
    def digest(self) -> str:
        """The SHA-256 of its content, by which another backup knows its base."""
        return _digest(_to_json(self))

    @property
    def time(self) -> str:
        """The moment of the rows, as text."""
        return utc(physical_us(self.snapshot))

    @property
    def rows(self) -> int:
        """The number of rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def file_bytes(self) -> int:
        """The number of bytes of all files."""
        return sum(table.file_bytes for table in self.tables)

    def name_of(self, table: TableEntry, file: FileEntry) -> str:
        """A file's name below the folder of all backups."""
        return f"{self.backup_id}/{table.folder}/{file.name}"

    def table(self, name: str) -> TableEntry:
        """The table of this name. Raises Rejected NOT_FOUND."""
        for table in self.tables:
            if table.name == name:
                return table
        there = ", ".join(table.name for table in self.tables)
        raise Rejected(f"backup {self.backup_id} has no table {name}; it has {there}", code=Code.NOT_FOUND)

    def sealed(self) -> bytes:
        """The manifest as a file."""
        return seal(_to_json(self))

    @staticmethod
    def of(raw: bytes, where: str, backup_id: str) -> Manifest:
        """The inverse of `sealed`. `where`: the file, for messages. `backup_id`: the name of its folder.

        Raises:
            Corrupt: it is cut or damaged, or not a manifest.
            Rejected: UNSUPPORTED_VERSION: a later release wrote it.
        """
        content = unseal(raw, where)
        try:
            if content["kind"] not in ("full", "incremental"):
                raise unknown_here(f"{where}: a backup of kind", str(content["kind"])[:40])
            found = _from_json(content)
        except SteleError as exc:
            if exc.code is Code.UNSUPPORTED_VERSION:
                raise
            raise Corrupt(f"{where}: {exc.args[0]}") from exc
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise Corrupt(f"{where}: it is no manifest of a backup ({exc!r})") from exc
        if found.backup_id != backup_id:
            raise Corrupt(
                f"{where} is of backup {found.backup_id}, which was not made in this folder; rename the folder to {found.backup_id}"
            )
        return found


def new_backup_id(snapshot: int, chance: str) -> str:
    """The name of a backup: the time of its rows, so that names sort by it, and eight digits of `chance`."""
    moment = datetime.fromtimestamp(physical_us(snapshot) / 1e6, UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{chance[:8]}"


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON text of `content`, with its checksum."""
    document = {
        "format": "stele-backup",
        "version": VERSION,
        "sha256": _digest(content),
        "content": content,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def unseal(raw: bytes, where: str) -> dict[str, Any]:
    """The inverse of `seal`.

    Raises:
        Corrupt: the text is cut or damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        document = parse_json(raw)
        if document["format"] != "stele-backup":
            raise ValueError("another format")
        version = whole_number(document["version"], _U64_MAX, 1)
    except (ValueError, TypeError, KeyError) as exc:
        raise Corrupt(f"{where}: it is cut or damaged, or no file of a backup ({exc})") from exc
    if version > VERSION:
        raise unknown_here(f"{where}: version", version)
    content = document.get("content")
    if not isinstance(content, dict) or document.get("sha256") != _digest(content):
        raise Corrupt(f"{where}: it is damaged: its content is not what was written")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    base = manifest.base
    return {
        "id": manifest.backup_id,
        "kind": manifest.kind,
        "base": None if base is None else {"id": base.backup_id, "sha256": base.sha256},
        **({"hold": manifest.hold} if manifest.hold else {}),
        **({"key": manifest.key} if manifest.key else {}),
        "cluster": manifest.cluster_id,
        "snapshot": str(manifest.snapshot),
        "time": manifest.time,
        "begun": manifest.begun.isoformat(),
        "finished": None if manifest.finished is None else manifest.finished.isoformat(),
        "program": manifest.program,
        "tables": [_table_to_json(table) for table in manifest.tables],
    }


def _table_to_json(table: TableEntry) -> dict[str, Any]:
    return {
        "name": table.name,
        "id": table.table_id,
        "folder": table.folder,
        "rows": table.rows,
        "bytes": table.file_bytes,
        "schema": json.loads(table.schema.to_json()),
        "partitioning": json.loads(table.partitioning.to_json()),
        "replicationFactor": table.replication_factor,
        "owner": table.owner,
        "comment": table.comment,
        "tablets": [
            {
                "id": tablet.tablet_id,
                "ordinal": tablet.ordinal,
                "files": [file_to_json(file) for file in tablet.files],
                **({"incarnation": tablet.incarnation} if tablet.incarnation else {}),
                **({} if tablet.whole else {"whole": False}),
            }
            for tablet in table.tablets
        ],
    }


def file_to_json(file: FileEntry) -> dict[str, Any]:
    """A file's entry as JSON."""
    return {"name": file.name, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}


def file_from_json(raw: Mapping[str, Any]) -> FileEntry:
    """The inverse of `file_to_json`. Raises ValueError, TypeError or KeyError."""
    sha256 = raw["sha256"]
    if not _SHA256.match(sha256):
        raise ValueError("a checksum is not a SHA-256")
    return FileEntry(
        _file_name(raw["name"]),
        whole_number(raw["rows"], _COUNT_MAX),
        whole_number(raw["bytes"], FILE_BYTES_MAX),
        sha256,
    )


def _file_name(text: str) -> str:
    if not _FILE.match(text):
        raise ValueError(f"{text!r} is no name of a file of a backup")
    return text


def _from_json(raw: Mapping[str, Any]) -> Manifest:
    backup_id, finished = raw["id"], raw["finished"]
    if not BACKUP_ID.fullmatch(backup_id):
        raise ValueError("its id does not have the form of a backup's id")
    base = None if raw["base"] is None else Base(str(raw["base"]["id"]), str(raw["base"]["sha256"]))
    if (raw["kind"] == "full") != (base is None) or (base and not BACKUP_ID.fullmatch(base.backup_id)):
        raise ValueError(f"the kind is {raw['kind']}, which does not fit its base")
    found = Manifest(
        backup_id,
        str(raw["cluster"]),
        whole_number(raw["snapshot"], _U64_MAX),
        datetime.fromisoformat(raw["begun"]),
        None if finished is None else datetime.fromisoformat(finished),
        str(raw["program"]),
        tuple(_table_from_json(table) for table in raw["tables"]),
        base,
        str(raw.get("hold", "")),
        str(raw.get("key", "")),
    )
    if base is None and not all(tablet.whole for table in found.tables for tablet in table.tablets):
        raise ValueError("it is a full backup, but has only the changes of some tablet")
    return found


def _table_from_json(raw: Mapping[str, Any]) -> TableEntry:
    schema = Schema.from_json(json.dumps(raw["schema"]))
    partitioning = PartitionSchema.from_json(json.dumps(raw["partitioning"]))
    if faults := partitioning.faults(schema):
        raise ValueError("; ".join(faults))
    return TableEntry(
        str(raw["name"]),
        str(raw["id"]),
        _file_name(raw["folder"]),
        schema,
        partitioning,
        whole_number(raw["replicationFactor"], 99, 1),
        tuple(
            TabletEntry(
                str(tablet["id"]),
                whole_number(tablet["ordinal"], _COUNT_MAX),
                tuple(file_from_json(file) for file in tablet["files"]),
                whole_number(tablet.get("incarnation", 0), _U64_MAX),
                bool(tablet.get("whole", True)),
            )
            for tablet in raw["tablets"]
        ),
        str(raw["owner"]),
        str(raw["comment"]),
    )

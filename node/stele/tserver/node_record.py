"""node.json: whose volume this is, and what must survive a restart outside the log. It has a copy,
node.json.copy.

The copy is written after node.json, so it is never newer. It is read where node.json is damaged or missing.
Only volume.py reads and writes both. Invariant: a record that was read is whole: its checksum held, or it was
written by a release without checksums.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import structlog

from stele.consensus.files import sync_directory
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import CATALOG_TABLET_ID, OPID_NONE, ClusterId, NodeId, OpId, StreamKey, is_id
from stele.model.jsons import parse_json
from stele.wal.sectors import is_bad_sector

log = structlog.get_logger("stele.tserver")
FORMAT_VERSION = 1
NODE_FILE = "node.json"
_COPY_FILE = "node.json.copy"
_CHECKSUM = "crc32c"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A leading master's list of dropped tables, whose replicas serve no clients; see
    stele.tserver.withdrawal.

    `digest`: how the leader names the list. `at`: the position in the catalog for which the list was true.
    """

    tables: tuple[str, ...] = ()
    digest: int = 0
    at: OpId = OPID_NONE


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The content of node.json. Fields with a default may be absent in the file of an earlier release."""

    cluster_id: ClusterId
    node_id: NodeId
    role: str
    format_id: str
    """Random; made when the volume was formatted."""
    incarnation: int = 0
    formed: bool = True
    """False on a first master until its formation is confirmed."""
    masters: tuple[str, ...] = ()
    """A leading master's newest list of addresses."""
    first_masters: tuple[tuple[str, str], ...] = ()
    """(node_id, address) in order; on a first master only."""
    catalog: OpId = OPID_NONE
    """Orders of masters below this are refused, see stele.tserver.fences."""
    driver_epoch: int = 0
    """Orders of drivers with a lower epoch are refused."""
    found: int = 0
    """Where the log ended at the first start that no majority of masters has admitted yet; 0 if each start
    was admitted."""
    refused: str = ""
    """Why the masters refused this volume as an older copy, for ever; "" if they did not.

    It is stored because each start writes to the log, which would later make the volume look newer than it
    is.
    """
    fork_id: str = ""
    """Which copy of the cluster's volumes this is; "": the original."""
    given: tuple[str, ...] = ()
    """The --masters of the start that learned `masters`, or of the first start; empty if not known."""
    adopted: bool = False
    """Whether the volume was copied, or taken elsewhere. Addresses in its configurations may belong to the
    original's nodes, so none is dialled.
    """
    taken_back: tuple[str, ...] = ()
    """When administrators took the volume back into use, and after which refusal; see `take_back`."""
    accepting: bool = False
    """Whether to ask the masters to accept that the log ends too early. True until they have recorded what
    the newest such start reports.
    """
    fenced: bool = False
    """Whether the node serves nobody, until a leading master ends that."""
    rewritten: tuple[str, ...] = ()
    """When, and for which tablet, an administrator made the replica here the only voter; see
    stele.tserver.offline."""
    dropped: Dropped = Dropped()
    promised_ms: int = 0
    """The longest lease that a replica here may ever have promised to a leader. After a start each replica
    waits that long before it votes. Never falls.
    """
    version: int = FORMAT_VERSION

    def holds(self, key: StreamKey) -> bool:
        """Whether this replica waits until the formation is confirmed. Only a first master's first replica of
        the catalog waits.
        """
        return key.tablet_id == CATALOG_TABLET_ID and not self.formed and not self.is_later_catalog(key)

    def is_later_catalog(self, key: StreamKey) -> bool:
        """Whether this replica of the catalog is a later one, made by a copy."""
        return key.tablet_id == CATALOG_TABLET_ID and key.replica_id > len(self.first_masters)


def is_formatted(directory: Path) -> bool:
    """Whether `directory` holds a node's record."""
    return any((directory / name).exists() for name in (NODE_FILE, _COPY_FILE))


def _checksum(fields: dict[str, Any]) -> int:
    """CRC-32C of the record's fields as JSON with sorted keys, so that the same fields always give the same number."""
    return int(google_crc32c.value(json.dumps(fields, sort_keys=True).encode()))


def write_record(directory: Path, record: NodeRecord) -> None:
    """Write both files; on return both survive power loss. Blocks."""
    fields = asdict(record)
    text = json.dumps(fields | {_CHECKSUM: _checksum(fields)}, indent=1, sort_keys=True) + "\n"
    for name in (NODE_FILE, _COPY_FILE):
        temporary = directory / (name + ".new")
        with temporary.open("w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, directory / name)
        sync_directory(directory)


def read_record(directory: Path) -> NodeRecord:
    """The node's record; read from the copy if node.json is damaged. Writes nothing: the start writes both
    files.

    Raises:
        Corrupt: both are damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    try:
        return _read_file(directory / NODE_FILE)
    except Corrupt as damaged:
        try:
            record = _read_file(directory / _COPY_FILE)
        except Corrupt:
            raise damaged from None
        log.warning("node.json was damaged; it is written again from its copy", fault=str(damaged))
        return record


def _read_file(path: Path) -> NodeRecord:
    try:
        raw = parse_json(path.read_text())
        checksum = raw.pop(_CHECKSUM, None)  # absent in files written before checksums existed
        if checksum is not None and checksum != _checksum(raw):
            raise Corrupt(f"{path}: damaged: its fields do not match its checksum {checksum}")
        version = int(raw["version"])
        if version > FORMAT_VERSION:
            raise Rejected(
                f"{path}: version {version} is unknown, this program reads up to {FORMAT_VERSION}; upgrade "
                f"it",
                code=Code.UNSUPPORTED_VERSION,
            )
        catalog = raw.get("catalog")
        return NodeRecord(
            cluster_id=ClusterId(_id(raw["cluster_id"])),
            node_id=NodeId(_id(raw["node_id"])),
            role=str(raw["role"]),
            format_id=str(raw["format_id"]),
            incarnation=int(raw["incarnation"]),
            formed=bool(raw["formed"]),
            masters=tuple(str(m) for m in raw["masters"]),
            first_masters=tuple((str(n), str(a)) for n, a in raw["first_masters"]),
            catalog=OpId(int(catalog["term"]), int(catalog["index"])) if catalog else OPID_NONE,
            driver_epoch=int(raw.get("driver_epoch", 0)),
            found=int(raw.get("found", 0)),
            refused=str(raw.get("refused", "")),
            fork_id=str(raw.get("fork_id", "")),
            given=tuple(str(m) for m in raw.get("given", ())),
            rewritten=tuple(str(m) for m in raw.get("rewritten", ())),
            adopted=bool(raw.get("adopted", False)),
            taken_back=tuple(str(t) for t in raw.get("taken_back", ())),
            accepting=bool(raw.get("accepting", False)),
            fenced=bool(raw.get("fenced", False)),
            dropped=_read_dropped(raw.get("dropped")),
            promised_ms=int(raw.get("promised_ms", 0)),
            version=version,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise Corrupt(f"{path}: {exc!r}; expected a node's record") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) or is_bad_sector(exc):
            raise Corrupt(f"{path}: {exc.strerror}; expected a node's record") from exc
        raise


def _id(text: str) -> str:
    if not is_id(text):
        raise ValueError(f"{text[:40]!r} is no identifier")
    return text


def _read_dropped(raw: dict[str, Any] | None) -> Dropped:
    if raw is None:
        return Dropped()
    at = OpId(int(raw["at"]["term"]), int(raw["at"]["index"]))
    return Dropped(tuple(str(t) for t in raw["tables"]), int(raw["digest"]), at)

"""Tickets and commands of Arrow Flight: which rows of which tablet, or which bytes of a tablet copy. Serves
nothing.

The format is a version byte and JSON, so that a client in any language can write it. Invariant: an unknown
version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from stele.model.bounds import HISTORY_MAX_MS, INCARNATION_MAX, INDEX_MAX, ROWS_MAX, SCAN_WAIT_MAX_MS
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import is_id
from stele.model.jsons import parse_json, whole_number
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.model.strict import Fields

TICKET_VERSION = 1
CHANGES_VERSION = 2
"""The version of a ticket for changes. A program that does not know them must not answer with a scan."""
COMMAND_BYTES_MAX = 64 << 10
_PART_BYTES_MAX = 1 << 62
_U64_MAX = (1 << 64) - 1
_INCARNATION, _DIGITS_MAX = b"stele.incarnation", 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One scan of one tablet. `snapshot` is a hybrid time; `scan` is the JSON of a ScanSpec.

    `wait_ms`: how long the node may wait until the snapshot can be served. `fork_id`: the copy of the cluster
    that the ticket is for; None: not said. `incarnation`: the tablet's incarnation; 0: any, because release
    0.1.0 does not say it. The schema of the rows says of which one they are (`with_incarnation`). `prepared`:
    the log index that PrepareSnapshot gave for this snapshot and incarnation, so that any replica may serve
    it; 0: not prepared. `resumable`: rows come in key order. The metadata of each batch are the least key
    after its last row. A reader that lost its node sends the ticket to another replica, with that as the
    scan's `lower`. A node of an earlier release sends no metadata. `any_replica`: a follower that does not
    know whether it holds the snapshot asks its leader. Without it, the reader is sent to the leader.
    """

    cluster_id: str
    tablet_id: str
    snapshot: int
    schema_version: int
    scan: str
    wait_ms: int = 5_000
    fork_id: str | None = None
    incarnation: int = 0
    prepared: int = 0
    resumable: bool = False
    any_replica: bool = False

    def encode(self) -> bytes:
        """The ticket as bytes; `decode_ticket` is the inverse."""
        scan = json.loads(self.scan)
        return _encode(
            {
                "cluster": self.cluster_id,
                "tablet": self.tablet_id,
                "snapshot": self.snapshot,
                "schema_version": self.schema_version,
                "scan": scan,
                "wait_ms": self.wait_ms,
                **_fork(self.fork_id),
                **({"incarnation": self.incarnation} if self.incarnation else {}),
                **({"prepared": self.prepared} if self.prepared else {}),
                **({"resumable": True} if self.resumable else {}),
                **({"any_replica": True} if self.any_replica else {}),
            },
            CHANGES_VERSION if "changes" in scan else TICKET_VERSION,
        )

    @staticmethod
    def _parse(fields: dict[str, Any]) -> Ticket:
        if not is_id(fields["tablet"]):
            raise ValueError("tablet is not an identifier")
        prepared = whole_number(fields.get("prepared", 0), INDEX_MAX)
        if prepared and not fields["snapshot"]:
            raise ValueError("it has `prepared`, but no snapshot; give the snapshot that was prepared")
        if fields.get("resumable") and "changes" in fields["scan"]:
            raise ValueError(
                "it is resumable, but a scan of changes gives no resume keys; leave out `resumable`"
            )
        return Ticket(
            cluster_id=str(fields["cluster"]),
            tablet_id=str(fields["tablet"]),
            snapshot=whole_number(fields["snapshot"], _U64_MAX),
            schema_version=whole_number(fields["schema_version"], _U64_MAX),
            scan=json.dumps(fields["scan"]),
            wait_ms=min(whole_number(fields.get("wait_ms", 5_000), _U64_MAX), SCAN_WAIT_MAX_MS),
            fork_id=_fork_of(fields),
            incarnation=whole_number(fields.get("incarnation", 0), INCARNATION_MAX),
            prepared=prepared,
            resumable=bool(fields.get("resumable", False)),
            any_replica=bool(fields.get("any_replica", False)),
        )

    def spec(self, schema: Schema) -> ScanSpec:
        """Return the scan, checked against the tablet's schema. Raises `Rejected` if it does not fit."""
        return ScanSpec.from_json(self.scan, schema)


def with_incarnation(schema: pa.Schema, incarnation: int) -> pa.Schema:
    """Add the tablet's incarnation to the schema of a scan's rows."""
    return schema.with_metadata({_INCARNATION: str(incarnation).encode()}) if incarnation else schema


def incarnation_of(schema: pa.Schema) -> int:
    """Return the tablet's incarnation when the rows were read. 0 if the schema has none: the tablet was never
    recovered.

    Raises:
        Retryable: UNAVAILABLE: what the schema names is not a valid incarnation.
    """
    told = (schema.metadata or {}).get(_INCARNATION, b"0")
    if not told.isdigit() or len(told) > _DIGITS_MAX or int(told) > INCARNATION_MAX:
        raise Retryable("the rows of a scan name no valid incarnation", code=Code.UNAVAILABLE)
    return int(told)


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """`length` bytes from `offset` on of one file of a copy session. Names caller and callee, as a call's
    metadata do."""

    cluster_id: str
    session_id: str
    name: str
    offset: int
    length: int
    from_node: str
    from_incarnation: int
    to_node: str
    protocol_version: int
    fork_id: str | None = None

    def encode(self) -> bytes:
        """The ticket as bytes."""
        return _encode(
            {
                "cluster": self.cluster_id,
                "session": self.session_id,
                "file": self.name,
                "offset": self.offset,
                "length": self.length,
                "from_node": self.from_node,
                "from_incarnation": self.from_incarnation,
                "to_node": self.to_node,
                "protocol": self.protocol_version,
                **_fork(self.fork_id),
            }
        )

    @staticmethod
    def _parse(fields: dict[str, Any]) -> CopyTicket:
        if not is_id(fields["from_node"]) or not is_id(fields["to_node"]):
            raise ValueError("from_node or to_node is not an identifier")
        offset, length = whole_number(fields["offset"], INDEX_MAX), whole_number(fields["length"], INDEX_MAX)
        if length == 0:
            raise ValueError("length is 0; at least 1 byte of the file is expected")
        return CopyTicket(
            cluster_id=str(fields["cluster"]),
            session_id=str(fields["session"]),
            name=str(fields["file"]),
            offset=offset,
            length=length,
            from_node=str(fields["from_node"]),
            from_incarnation=whole_number(fields["from_incarnation"], INCARNATION_MAX),
            to_node=str(fields["to_node"]),
            protocol_version=whole_number(fields["protocol"], _U64_MAX),
            fork_id=_fork_of(fields),
        )


def _fork(fork_id: str | None) -> dict[str, str]:
    return {} if fork_id is None else {"fork": fork_id}


def _fork_of(fields: dict[str, Any]) -> str | None:
    return str(fields["fork"]) if "fork" in fields else None


def decode_ticket(raw: bytes) -> Ticket | CopyTicket:
    """Decode a ticket of either kind. One that names a session is a copy's.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the version. INVALID_ARGUMENT: not a ticket.
    """

    def parse(fields: dict[str, Any]) -> Ticket | CopyTicket:
        copy = "session" in fields
        if (not copy and "changes" in fields["scan"]) != (raw[0] == CHANGES_VERSION):
            raise ValueError(f"version {CHANGES_VERSION} is for changes, and only for them")
        return CopyTicket._parse(fields) if copy else Ticket._parse(fields)

    return _decode(raw, "ticket", parse, newest=CHANGES_VERSION)


_COMMAND_FIELDS = (
    "table",
    "tablet",
    "columns",
    "snapshot",
    "where",
    "limit",
    "resumable",
    "statistics",
    "prepare",
    "part_bytes",
    "max_staleness_ms",
)


@dataclass(frozen=True, slots=True)
class ScanCommand:
    """A GetFlightInfo command: a whole table by name, or one tablet. `columns` by name; () for all.

    `snapshot` 0 means now. The rest is for whole tables. `where`: as in stele.model.where. `limit`: for each
    ticket. `resumable`: as in `Ticket`. `statistics`: ask the leaders how many rows and bytes there are.
    `prepare`: have the leaders prepare the snapshot, so that any replica serves it. `part_bytes`: cut tablets
    into tickets of about this many bytes of files; 0: one ticket for each tablet. `max_staleness_ms`: choose
    a snapshot that may be up to this old, so that followers can serve it; None: do not.
    """

    table: str = ""
    tablet_id: str = ""
    columns: tuple[str, ...] = ()
    snapshot: int = 0
    where: str = ""
    limit: int | None = None
    resumable: bool = False
    statistics: bool = False
    prepare: bool = False
    part_bytes: int = 0
    max_staleness_ms: int | None = None

    def encode(self) -> bytes:
        """The command as bytes."""
        return _encode(
            {
                "table": self.table,
                "tablet": self.tablet_id,
                "columns": list(self.columns),
                "snapshot": self.snapshot,
                "where": self.where,
                "limit": self.limit,
                "resumable": self.resumable,
                "statistics": self.statistics,
                "prepare": self.prepare,
                "part_bytes": self.part_bytes,
                **({} if self.max_staleness_ms is None else {"max_staleness_ms": self.max_staleness_ms}),
            }
        )

    @staticmethod
    def decode(raw: bytes) -> ScanCommand:
        """The inverse of `encode`.

        Raises:
            Rejected: TOO_LARGE; otherwise what `decode_ticket` raises.
        """
        if len(raw) > COMMAND_BYTES_MAX:
            raise Rejected(
                f"the command has {len(raw)} bytes; at most {COMMAND_BYTES_MAX} are allowed; name fewer values",
                code=Code.TOO_LARGE,
            )

        def parse(body: Any) -> ScanCommand:
            fields = Fields(body, _COMMAND_FIELDS)
            limited = fields.get("limit") is not None
            aged = fields.get("max_staleness_ms") is not None
            max_staleness_ms = fields.number("max_staleness_ms", HISTORY_MAX_MS)
            limit = fields.number("limit", ROWS_MAX)
            command = ScanCommand(
                table=fields.text("table"),
                tablet_id=fields.text("tablet"),
                columns=fields.texts("columns"),
                snapshot=fields.number("snapshot", _U64_MAX),
                where=fields.text("where"),
                limit=limit if limited else None,
                resumable=fields.flag("resumable"),
                statistics=fields.flag("statistics"),
                prepare=fields.flag("prepare"),
                part_bytes=fields.number("part_bytes", _PART_BYTES_MAX),
                max_staleness_ms=max_staleness_ms if aged else None,
            )
            fields.refuse_faults()
            if bool(command.table) == bool(command.tablet_id):
                raise ValueError("name either a table or a tablet")
            if aged and command.snapshot:
                raise ValueError("give either a snapshot or max_staleness_ms")
            return command

        return _decode(raw, "command", parse)


def _encode(fields: dict[str, Any], version: int = TICKET_VERSION) -> bytes:
    return bytes([version]) + json.dumps(fields, separators=(",", ":")).encode()


def _decode(raw: bytes, what: str, parse: Callable[[dict[str, Any]], T], newest: int = TICKET_VERSION) -> T:
    if not raw or not TICKET_VERSION <= raw[0] <= newest:
        version = raw[0] if raw else "none"
        known = TICKET_VERSION if newest == TICKET_VERSION else f"{TICKET_VERSION} to {newest}"
        raise Rejected(
            f"{what}: version {version} is unknown; this program reads {known}: a byte of version, then JSON",
            code=Code.UNSUPPORTED_VERSION,
        )
    try:
        return parse(parse_json(raw[1:]))
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        told = str(exc) if isinstance(exc, ValueError) else repr(exc)
        raise Rejected(f"{what}: {told}; docs/flight.md describes the format") from exc

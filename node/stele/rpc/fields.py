"""The bound of every field of every unary request, and the check against it. Called by server.py.

A bound is found by message and field name, otherwise by field name alone. A test checks that every field of
every request has one. Streams of nodes and clients have their own checks where they are read.

Invariant: a servicer never gets a longer string or list, a larger number, or an unknown enum value.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from stele.model import bounds
from stele.model.errors import Rejected

ELSEWHERE = -1
"""No bound here: the code that reads the field checks it, and the message limit bounds it."""

LENGTHS: dict[str, int] = {
    # Identifiers: 16 bytes or none, as stele.rpc.convert says.
    **dict.fromkeys(
        (
            *("tablet_id", "table_id", "node_id", "cluster_id", "leader_hint", "source_node"),
            *("target_node", "requestor_node", "from_node", "to_node", "tablet_ids", "alter_id"),
            *("survivor_node", "drop_id", "recall_id"),
        ),
        ELSEWHERE,
    ),
    "name": bounds.TEXT_CHARS_MAX,  # a name to look up
    "CreateTableRequest.name": ELSEWHERE,
    **dict.fromkeys(("new_name", "drop_column"), bounds.TEXT_CHARS_MAX),
    "hold": bounds.WORD_CHARS_MAX,
    "read_default": ELSEWHERE,
    "RegisterNodeRequest.name": bounds.NODE_NAME_CHARS_MAX,
    "ColumnPB.name": ELSEWHERE,
    "address": bounds.ADDRESS_CHARS_MAX,
    "from_address": bounds.ADDRESS_CHARS_MAX,
    "source_address": bounds.ADDRESS_CHARS_MAX,
    **dict.fromkeys(("holder", "owner", "waiting"), bounds.HOLDER_CHARS_MAX),
    **dict.fromkeys(("reason", "told", "held", "comment"), bounds.TEXT_CHARS_MAX),
    "damage": bounds.TEXT_CHARS_MAX,
    **dict.fromkeys(
        ("role", "kind", "type", "channel", "format_id", "session_id", "fork_id", "cause"),
        bounds.WORD_CHARS_MAX,
    ),
    "default_value": ELSEWHERE,
    **dict.fromkeys(("split_keys", "range_start", "range_end"), bounds.KEY_BYTES_MAX),
}
"""Characters of strings and bytes of byte strings, also of each item in a list."""

COUNTS: dict[str, int] = {
    "peers": bounds.PEERS_MAX,
    "masters": bounds.MASTERS_MAX,
    "steps": bounds.COLUMNS_MAX,
    **dict.fromkeys(("holding", "waiting", "away"), ELSEWHERE),  # checked with the rest of the policy
    **dict.fromkeys(("columns", "key_column_ids", "column_ids", "hash", "hash_buckets"), bounds.COLUMNS_MAX),
    **dict.fromkeys(("split_keys", "numbers", "tablet_ids"), bounds.PARTITIONS_MAX),
}

NUMBERS: dict[str, int] = {
    **dict.fromkeys(("term", "caller_term"), bounds.TERM_MAX),
    **dict.fromkeys(("index", "opid_index", "config_index", "cas_config_opid_index"), bounds.INDEX_MAX),
    "cas_config_opid_index_less_or_equal": bounds.INDEX_MAX,
    **dict.fromkeys(("epoch", "driver_epoch"), bounds.EPOCH_MAX),
    **dict.fromkeys(
        ("replica_id", "replaces_replica", "requestor_replica", "survivor_replica", "other_replica"),
        bounds.REPLICA_ID_MAX,
    ),
    **dict.fromkeys(
        ("tablet_incarnation", "incarnation", "from_incarnation", "to_incarnation"), bounds.INCARNATION_MAX
    ),
    "ttl_ms": bounds.CLAIM_TTL_MAX_MS,
    "for_ms": bounds.WANTED_FOR_MAX_MS,
    "keep_ms": bounds.KEEP_DROPPED_MAX_MS,
    **dict.fromkeys(("history_ms", "set_history_ms"), ELSEWHERE),  # the schema says what is wrong
    **dict.fromkeys(("expires_us", "at_us"), bounds.WALL_US_MAX),
    **dict.fromkeys(("CopyRecordPB.rows", "other_rows"), bounds.ROWS_MAX),
    **dict.fromkeys(("CopyRecordPB.checksum", "other_checksum"), ELSEWHERE),  # only compared
    # Only compared with local values, or kept as it is.
    **dict.fromkeys(("snapshot", "bytes_per_second", "bytes", "ViewPlacePB.sequence"), ELSEWHERE),
    **dict.fromkeys(
        ("HoldHistoryRequest.since", "expires_in_ms", "bytes_max"), ELSEWHERE
    ),  # the order says what is wrong
    **dict.fromkeys(("dead_after_ms", "drive_after_ms"), ELSEWHERE),  # checked with the rest of the policy
}
"""Fields of 64 bits. Fields that may be negative are -1 or more. Narrower fields bound themselves."""

APART = frozenset({"TSHeartbeatRequest"})
"""Requests with their own check: a node whose report is too large must not count as lost
(stele.master.heartbeat_bounds)."""
UNREAD = frozenset(
    {
        *("CreateTabletRequest.schema", "CreateTabletRequest.partitioning", "CreateTabletRequest.table_name"),
        "AlterTabletRequest.schema",
    }
)
"""Fields that a master copies from its catalog, which may be older than these bounds."""

_WIDE = frozenset(
    {
        *(FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64),
        FieldDescriptor.TYPE_FIXED64,
    }
)


class _Bound(NamedTuple):
    """Bounds of one field. `items`, `length`, `number`: -1 for none. `values`: the known numbers of an
    enum."""

    name: str
    repeated: bool
    items: int
    length: int
    number: int
    values: frozenset[int] | None
    walked: bool


def bound_of(table: dict[str, int], message: str, field: str) -> int | None:
    """The bound of a field in one of the tables above; None if the table has none for it."""
    return table.get(f"{message}.{field}", table.get(field))


@cache
def _bounds(descriptor: Descriptor) -> dict[int, _Bound]:
    found = {}
    for field in descriptor.fields:
        name = f"{descriptor.name}.{field.name}"
        if name in UNREAD:
            continue
        texts = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        values = None
        if field.enum_type is not None:
            values = frozenset(value.number for value in field.enum_type.values)
        bound = _Bound(
            name,
            field.is_repeated,
            _or_none(bound_of(COUNTS, descriptor.name, field.name)) if field.is_repeated else ELSEWHERE,
            _or_none(bound_of(LENGTHS, descriptor.name, field.name)) if texts else ELSEWHERE,
            _or_none(bound_of(NUMBERS, descriptor.name, field.name)) if field.type in _WIDE else ELSEWHERE,
            values,
            field.message_type is not None,
        )
        if bound.walked or values or max(bound.items, bound.length, bound.number) != ELSEWHERE:
            found[field.number] = bound
    return found


def _or_none(bound: int | None) -> int:
    return ELSEWHERE if bound is None else bound


def refuse_beyond_bounds(message: Message) -> None:
    """Refuse a request if a field exceeds its bound.

    Raises:
        Rejected: INVALID_ARGUMENT with field, size and bound of the first such field.
    """
    if message.DESCRIPTOR.name not in APART:
        _look(message)


def _look(message: Message) -> None:
    known = _bounds(message.DESCRIPTOR)
    for field, value in message.ListFields():
        bound = known.get(field.number)
        if bound is None:
            continue
        if not bound.repeated:
            _judge(bound, value)
            continue
        if bound.items != ELSEWHERE and len(value) > bound.items:
            raise Rejected(f"{bound.name} has {len(value)} items; at most {bound.items} are allowed")
        for one in value:
            _judge(bound, one)


def _judge(bound: _Bound, value: Any) -> None:
    if bound.walked:
        _look(value)
    elif bound.length != ELSEWHERE:
        if len(value) > bound.length:
            what = "characters" if isinstance(value, str) else "bytes"
            raise Rejected(f"{bound.name} has {len(value)} {what}; at most {bound.length} are allowed")
    elif bound.number != ELSEWHERE:
        if value < -1:
            raise Rejected(f"{bound.name} is {value}; it must not be negative")
        if value > bound.number:
            raise Rejected(f"{bound.name} is {value}; at most {bound.number} is allowed")
    elif bound.values is not None and value not in bound.values:
        raise Rejected(
            f"{bound.name} is {value}, which this program does not know; upgrade it, or send another value"
        )

"""Operations on a key space, as they are in a WRITE payload after its header. Built by masters and clients,
applied by stele.tablet.keyspace; opens no files.

Layout, little-endian: u8 version (1), u8 zero, u16 number of operations. Then each operation:

- u8 op, u8 flags (1: expected value given, 2: a lease), u16 zero
- u32 key length, u32 value length, u32 expected length
- key, value, expected
- with flag 2: u64 lease

Invariant: a batch is applied whole or not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from stele.model.amounts import plural
from stele.model.errors import Code, Corrupt, Rejected

VERSION = 1
KEY_BYTES_MAX = 4096
VALUE_BYTES_MAX = 8 << 20
OPERATIONS_MAX = 65_535
WRITE_KEYS_MAX = 1_000
"""The most keys that one write of a client may name. They take a node some milliseconds."""
WRITE_BYTES_MAX = 8 << 20
"""Most bytes of one write of a client: keys, values, expected values, and 16 more for each key."""
_HEADER = struct.Struct("<BBH")
_OP = struct.Struct("<BBHIII")
_LEASE = struct.Struct("<Q")
_FLAG_EXPECTED = 1
_FLAG_LEASE = 2
LEASES_VERSION = 2
"""The cluster version from which leases may be written."""
LEASE_MAX = (1 << 63) - 1
"""The highest id of a lease; 0 is none."""
TTL_MIN_MS, TTL_MAX_MS = 1_000, 86_400_000
"""The shortest and the longest time that a lease may live without hearing from its holder. An election may take
most of a second, so a lease must last at least that long."""
_NOTHING = "key space write: it changes no key; set or remove at least one"


class KeyOp(IntEnum):
    """What is done with a key. The numbers are on disk and on the wire.

    REPLACE sets it in any case. INSERT fails (ALREADY_PRESENT) if the key is present. DELETE removes it,
    present or not. CAS sets it if its value is `expected` (None: absent), else fails (CAS_FAILED). CHECK
    changes nothing, and fails (CAS_FAILED) unless the value is `expected`. DELETE with an `expected` value
    fails (CAS_FAILED) for another value. REPLACE, INSERT and CAS attach the key to a lease, if one is given.

    GRANT begins a lease; its value is how long the lease lives, in ms. REVOKE ends a lease and removes its keys.
    The key of both is the lease's id: see `lease_key`. Only programs of cluster version 2 or later read leases.
    """

    REPLACE = 1
    INSERT = 2
    DELETE = 3
    CAS = 4
    CHECK = 5
    GRANT = 6
    REVOKE = 7


LEASE_OPS = frozenset((KeyOp.GRANT, KeyOp.REVOKE))
"""The operations on leases. Their `key` names a lease, not a key of the key space."""
_CHANGES = (KeyOp.REPLACE, KeyOp.DELETE)


@dataclass(frozen=True, slots=True)
class KeyOperation:
    """One operation of a batch. CAS, CHECK and DELETE use `expected`; for DELETE, None means any value."""

    op: KeyOp
    key: bytes
    value: bytes = b""
    expected: bytes | None = None
    lease: int = 0


def lease_key(lease: int) -> bytes:
    """A lease's id as the key of GRANT and REVOKE."""
    return _LEASE.pack(lease)


def lease_of(operation: KeyOperation) -> int:
    """The id that GRANT or REVOKE names. Raises Corrupt if the key is not an id."""
    if len(operation.key) != _LEASE.size:
        raise Corrupt(f"a lease's id has {len(operation.key)} bytes; expected {_LEASE.size}")
    return int(_LEASE.unpack(operation.key)[0])


def grant(lease: int, ttl_ms: int) -> KeyOperation:
    """Return the operation that begins a lease."""
    return KeyOperation(KeyOp.GRANT, lease_key(lease), _LEASE.pack(ttl_ms))


def ttl_of(operation: KeyOperation) -> int:
    """Return how long the lease of a GRANT lives, in ms. Raises Corrupt if the value is not a time."""
    if len(operation.value) != _LEASE.size:
        raise Corrupt(f"a lease's time has {len(operation.value)} bytes; expected {_LEASE.size}")
    return int(_LEASE.unpack(operation.value)[0])


def revoke(lease: int) -> KeyOperation:
    """Return the operation that ends a lease and removes its keys."""
    return KeyOperation(KeyOp.REVOKE, lease_key(lease))


def encode_operations(operations: Sequence[KeyOperation]) -> bytes:
    """The bytes of a batch.

    Raises:
        Rejected: lists all faults: no operations, too many, an empty or too long key, a too long value, a key
            that is written twice.
    """
    faults = []
    if not 0 < len(operations) <= OPERATIONS_MAX:
        faults.append(f"it has {len(operations)} operations; expected 1 to {OPERATIONS_MAX}")
    written: set[tuple[bool, bytes]] = set()
    parts = [_HEADER.pack(VERSION, 0, len(operations) & 0xFFFF)]
    for operation in operations:
        if not 0 < len(operation.key) <= KEY_BYTES_MAX:
            faults.append(f"a key has {len(operation.key)} bytes; expected 1 to {KEY_BYTES_MAX}")
        if len(operation.value) > VALUE_BYTES_MAX:
            faults.append(
                f"key {operation.key!r}: its value has {len(operation.value)} bytes; "
                f"at most {VALUE_BYTES_MAX} are allowed"
            )
        if operation.op is not KeyOp.CHECK:
            place = operation.op in LEASE_OPS, operation.key
            if place in written:
                faults.append(f"key {operation.key!r} is written twice in one batch")
            written.add(place)
        expected = operation.expected
        flags = (0 if expected is None else _FLAG_EXPECTED) | (_FLAG_LEASE if operation.lease else 0)
        expected = expected or b""
        parts.append(
            _OP.pack(operation.op, flags, 0, len(operation.key), len(operation.value), len(expected))
            + operation.key
            + operation.value
            + expected
            + (_LEASE.pack(operation.lease) if operation.lease else b"")
        )
    if faults:
        raise Rejected("key space batch: " + "; ".join(faults))
    return b"".join(parts)


def encode_write(
    values: Mapping[bytes, bytes | None], when: Mapping[bytes, bytes | None], lease: int = 0
) -> bytes:
    """Return the bytes of a client's write: if each key of `when` has the value there, set each key of `values`.

    None means an absent key. `lease`: the lease to which the set keys are attached; 0: none.

    Raises:
        Rejected: the write changes no key, or as `encode_operations`. TOO_LARGE: too many keys or bytes.
    """
    if not values:
        raise Rejected(_NOTHING)
    _check_size(len(values) + len(when), 0)
    checks = [KeyOperation(KeyOp.CHECK, key, expected=value) for key, value in when.items()]
    changes = [
        KeyOperation(KeyOp.DELETE, key)
        if value is None
        else KeyOperation(KeyOp.REPLACE, key, value, lease=lease)
        for key, value in values.items()
    ]
    data = encode_operations(checks + changes)
    _check_size(len(checks) + len(changes), len(data))
    return data


def decode_write(data: bytes) -> list[KeyOperation]:
    """The inverse of `encode_write`, for a node.

    Raises:
        Rejected: the bytes are not a batch, or have an operation that clients may not send. TOO_LARGE: too many
            keys or bytes. UNSUPPORTED_VERSION: as `decode_operations`.
    """
    _check_size(_HEADER.unpack_from(data)[2] if len(data) >= _HEADER.size else 0, len(data))
    try:
        operations = decode_operations(data)
    except Corrupt as exc:  # a client's bytes, not a disk's
        raise Rejected(str(exc.args[0])) from exc
    for operation in operations:
        wrong = operation.op is not KeyOp.CHECK and (
            operation.op not in _CHANGES or operation.expected is not None
        )
        if wrong or (operation.lease and operation.op is not KeyOp.REPLACE):
            raise Rejected(
                f"key space write: operation {operation.op.name}; expected REPLACE, DELETE or CHECK"
            )
    if all(operation.op is KeyOp.CHECK for operation in operations):
        raise Rejected(_NOTHING)
    return operations


def _check_size(keys: int, size: int) -> None:
    """Refuse a write of too many keys or bytes."""
    for count, most, noun in ((keys, WRITE_KEYS_MAX, "key"), (size, WRITE_BYTES_MAX, "byte")):
        if count > most:
            raise Rejected(
                f"key space write: {plural(count, noun)}; at most {most:,} are allowed", code=Code.TOO_LARGE
            )


def decode_operations(data: bytes | memoryview) -> list[KeyOperation]:
    """The inverse of `encode_operations`.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the version, an operation, a flag or a
            reserved byte.
        Corrupt: the bytes are not a batch.
    """
    try:
        version, zero, count = _HEADER.unpack_from(data)
        if version != VERSION or zero:
            raise Rejected(
                f"key space batch version {version}, reserved byte {zero}; this program reads {VERSION}, 0; upgrade it",
                code=Code.UNSUPPORTED_VERSION,
            )
        at = _HEADER.size
        found = []
        for _ in range(count):
            op, flags, zero, key_length, value_length, expected_length = _OP.unpack_from(data, at)
            at += _OP.size
            if op not in _OPS or flags & ~(_FLAG_EXPECTED | _FLAG_LEASE) or zero:
                raise Rejected(
                    f"key space operation {op}, flags {flags}, reserved bytes {zero}; this program knows operations "
                    f"{min(_OPS)} to {max(_OPS)}, flags {_FLAG_EXPECTED} and {_FLAG_LEASE}, zeros; upgrade it",
                    code=Code.UNSUPPORTED_VERSION,
                )
            end = at + key_length + value_length + expected_length
            if end > len(data):
                raise Corrupt(
                    f"key space batch of {len(data)} bytes ends within an operation that ends at {end}"
                )
            key = bytes(data[at : at + key_length])
            value = bytes(data[at + key_length : at + key_length + value_length])
            expected = bytes(data[end - expected_length : end]) if flags & _FLAG_EXPECTED else None
            lease = 0
            if flags & _FLAG_LEASE:
                (lease,) = _LEASE.unpack_from(data, end)
                end += _LEASE.size
            found.append(KeyOperation(KeyOp(op), key, value, expected, lease))
            at = end
    except struct.error as exc:
        raise Corrupt(f"key space batch of {len(data)} bytes: {exc}") from exc
    if at != len(data):
        raise Corrupt(f"key space batch: {len(data) - at} bytes left over")
    return found


_OPS = frozenset(int(op) for op in KeyOp)

"""Payload of a WRITE entry: a fixed header that makes retries harmless, then the body. The body is a block, key space
operations, a new schema, or an order about a hold.

The leader builds the payload, and each replica decodes it when it applies the entry. Opens no files.

Header, 56 bytes, little-endian:

- u8 version, u8 body kind, u16 flags, u32 schema version
- 16 bytes client id
- u64 sequence, u64 lowest unfinished sequence
- u64 time when the client id was made (µs since 1970)
- u64 xxh3-64 of the body
- with flag 2, 40 bytes for an attempt at a part of a job:
  - 16 bytes job, u64 time when it was made
  - u64 number, u32 part, u32 zero

56 and 96 are multiples of eight, so a block's Arrow buffers stay aligned. Flag 1, plain: the leader has checked that
the block only upserts whole rows, and that none of them can be refused. Its outcome is known without decoding
it, unless other attempts at the same part have written.

Invariant: a write with a client id of sixteen zero bytes is not remembered for retries. Stele's own proposals
use this id.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import xxhash

from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.job import Attempt
from stele.model.record import record
from stele.model.schema import Schema

HEADER = struct.Struct("<BBHI16sQQQQ")
_ATTEMPT = struct.Struct("<16sQQII")
HEADER_BYTES_MAX = HEADER.size + _ATTEMPT.size
VERSION = 1
NO_CLIENT = bytes(16)
WRITE_BYTES_MAX = 8 << 20
"""The most bytes of header and body of one write. Clients do not send a larger one, and leaders refuse it."""
_PLAIN = 1
_OF_JOB = 2


class BodyKind(IntEnum):
    """What follows the header. The numbers are on disk."""

    BLOCK = 1
    KEYSPACE = 2
    SCHEMA = 3  # the JSON text of the schema that the table has from here on
    HOLD = 4  # an order about a hold on the tablet's history (stele.model.holds)


_KINDS = {int(kind): kind for kind in BodyKind}


@record
class WriteHeader:
    """Which client wrote, and which of its writes this is."""

    client_id: bytes
    sequence: int
    lowest_unfinished: int
    first_attempt_us: int
    digest: int
    schema_version: int = 0
    kind: BodyKind = BodyKind.BLOCK
    plain: bool = False
    attempt: Attempt | None = None


def schema_change(schema: Schema) -> bytes:
    """Return the payload that gives a table this schema. Applying it twice changes nothing more."""
    body = schema.to_json().encode()
    header = WriteHeader(NO_CLIENT, 0, 0, 0, digest(body), int(schema.version), BodyKind.SCHEMA)
    return encode(header, body)


def digest(body: bytes | memoryview) -> int:
    """xxh3-64 of a body, as clients send it."""
    return xxhash.xxh3_64_intdigest(body)


def encode(header: WriteHeader, body: bytes) -> bytes:
    """Header and body as one payload."""
    packed = HEADER.pack(
        VERSION,
        header.kind,
        (_PLAIN if header.plain else 0) | (0 if header.attempt is None else _OF_JOB),
        header.schema_version,
        header.client_id,
        header.sequence,
        header.lowest_unfinished,
        header.first_attempt_us,
        header.digest,
    )
    if (attempt := header.attempt) is not None:
        packed += _ATTEMPT.pack(attempt.job, attempt.made_us, attempt.number, attempt.part, 0)
    return packed + body


def number_of(payload: bytes) -> bytes:
    """Return the bytes of client id and sequence in an encoded write. A retry of the write has the same."""
    return payload[8:32]


def decode(payload: bytes) -> tuple[WriteHeader, memoryview]:
    """The header, and the body without a copy.

    Raises:
        Corrupt: the payload is shorter than a header.
        Rejected: UNSUPPORTED_VERSION: this program does not know the version or the kind.
    """
    if len(payload) < HEADER.size:
        raise Corrupt(f"the write payload has {len(payload)} bytes; expected at least {HEADER.size}")
    version, number, flags, schema_version, client_id, sequence, lowest, first_us, body_digest = (
        HEADER.unpack_from(payload)
    )
    kind = _KINDS.get(number)
    if version != VERSION or kind is None or flags & ~(_PLAIN | _OF_JOB):
        raise Rejected(
            f"write payload version {version}, kind {number}, flags {flags}; this program reads version {VERSION}, "
            f"kinds 1 to {max(_KINDS)}, flags 1 and 2; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    at, attempt = HEADER.size, None
    if flags & _OF_JOB:
        attempt, at = _attempt(payload), HEADER_BYTES_MAX
    plain = bool(flags & _PLAIN)
    header = WriteHeader(
        client_id, sequence, lowest, first_us, body_digest, schema_version, kind, plain, attempt
    )
    return header, memoryview(payload)[at:]


def _attempt(payload: bytes) -> Attempt:
    if len(payload) < HEADER_BYTES_MAX:
        raise Corrupt(f"the write payload has {len(payload)} bytes; expected at least {HEADER_BYTES_MAX}")
    job, made_us, number, part, zero = _ATTEMPT.unpack_from(payload, HEADER.size)
    if zero:
        raise Rejected(
            f"write payload of a job with reserved bytes {zero}; this program reads 0; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return Attempt(job, made_us, part, number)


def not_understood(header: WriteHeader, body: bytes | memoryview, why: SteleError) -> SteleError:
    """Return the error for a committed body that this program cannot read. It stops applying there. `why`: the
    reason.

    It is not an outcome of the write, because replicas with the leader's program can read the body. If the
    digest fits, a later release wrote the body (UNSUPPORTED_VERSION). Otherwise it is damaged (Corrupt).
    """
    if digest(body) != header.digest:
        return Corrupt(f"a committed write is damaged: {why.args[0]}; copy the replica from a peer")
    return Rejected(f"a committed write cannot be read: {why.args[0]}", code=Code.UNSUPPORTED_VERSION)

"""The file of a key space: the applied position, the exactly-once state and the pairs. Called by keyspace.py.

It is written and read in small pieces, because other threads, also the event loop's, wait while one handles
large bytes.

Layout of the body, little-endian:

- u32 length and text (JSON: term, index, ceiling, timestamp; in version 2, leases)
- u32 length and exactly-once state
- each pair: u32 key length, u32 value length, u64 log index of the entry that set it; in version 2, u64 lease; key, value

A key space without leases is written as version 1, which release 0.1.0 reads.

Invariant: nothing of a file is used before the checksum of all of it was compared.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stele.model.errors import Corrupt
from stele.model.ids import OpId
from stele.model.jsons import parse_json
from stele.tablet import exactly_once
from stele.tablet.checked import PIECE_BYTES, opened, seal_pieces
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.leases import Leases
from stele.tablet.pairs import LEASED, PACKED, Pair, Pairs, packed, packed_with_lease
from stele.tablet.progress import Progress

FILE_NAME = "keyspace"
_MAGIC = b"STLKEYSP"
_VERSION = 2
_WITHOUT_LEASES = 1
_LENGTH = struct.Struct("<I")


def parts(
    opid: OpId,
    ceiling: int,
    timestamp: int,
    once: Any,
    pairs: Mapping[bytes, Pair],
    leases: Mapping[int, int],
) -> Iterator[bytes]:
    """The file's bytes, in pieces. `once`: the result of `ExactlyOnce.frozen`. `leases`: the time to live of each
    lease in ms, by its id. `pairs` must not change until the last piece is taken."""
    head: dict[str, Any] = {
        "term": opid.term,
        "index": opid.index,
        "ceiling": ceiling,
        "timestamp": timestamp,
    }
    if leases:
        head["leases"] = sorted(leases.items())
    pack = packed_with_lease if leases else packed
    start = _with_length(json.dumps(head).encode()) + _with_length(exactly_once.encode(once))

    def body() -> Iterator[bytes]:
        yield from _cut(start)
        yield from _gathered(pack(key, pair) for key, pair in pairs.items())

    return seal_pieces(_MAGIC, _VERSION if leases else _WITHOUT_LEASES, body)


def read(path: Path) -> tuple[Progress, ExactlyOnce, Pairs, Leases]:
    """The content of a file.

    Raises:
        Corrupt: the file is missing or damaged.
        Rejected: UNSUPPORTED_VERSION.
    """
    with opened(path, _MAGIC, _VERSION, oldest=_WITHOUT_LEASES) as body:
        try:
            head = parse_json(_text(body))
            once = ExactlyOnce.decode(_text(body))
            applied = OpId(int(head["term"]), int(head["index"]))
            progress = Progress(applied, int(head["ceiling"]), int(head["timestamp"]))
            leases = Leases({int(lease): int(ttl) for lease, ttl in head.get("leases", ())})
            pairs = dict(_pairs(body, bool(leases)))
            for key, (_, _, lease) in pairs.items():
                leases.move(key, 0, lease)
            return progress, once, Pairs(pairs), leases
        except (ValueError, TypeError, KeyError, struct.error) as exc:
            raise Corrupt(f"{path.name}: {exc!r}; the file is damaged; copy the replica from a peer") from exc


def verify(path: Path, progress: Callable[[int], None]) -> None:
    """Compare a file's checksum. Calls `progress` with the bytes of each piece; an exception from it ends the
    reading.

    Raises:
        Corrupt, Rejected: see `read`.
    """
    with opened(path, _MAGIC, _VERSION, progress, oldest=_WITHOUT_LEASES):
        pass


def _with_length(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _gathered(small: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of about PIECE_BYTES, never more."""
    held: list[bytes] = []
    size = 0
    for part in small:
        if size + len(part) > PIECE_BYTES:
            yield from _cut(b"".join(held))
            held, size = [], 0
        held.append(part)
        size += len(part)
    yield from _cut(b"".join(held))


def _cut(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


def _text(body: BinaryIO) -> bytes:
    (length,) = _LENGTH.unpack(body.read(_LENGTH.size))
    return body.read(length)


def _pairs(body: BinaryIO, leased: bool) -> Iterator[tuple[bytes, Pair]]:
    lengths = LEASED if leased else PACKED
    while head := body.read(lengths.size):
        key_length, value_length, index, *lease = lengths.unpack(head)
        yield body.read(key_length), (body.read(value_length), index, lease[0] if lease else 0)

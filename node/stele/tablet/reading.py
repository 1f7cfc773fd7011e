"""Reads bytes of a file through its descriptor, in little memory. Called by colfile.py before it uses mapped
bytes.

Invariant: a disk error is an OSError of these calls. Through a map it would be SIGBUS, which ends the process
and every replica in it.
"""

from __future__ import annotations

import os

import google_crc32c
import numpy as np

_PIECE_BYTES = 256 << 10


def read_at(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` on, or as many as the file has. Blocks. Raises OSError."""
    pieces = []
    while length > 0 and (piece := os.pread(fd, length, offset)):
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return b"".join(pieces)


def sum_at(fd: int, offset: int, length: int) -> int:
    """CRC-32C of `length` bytes from `offset` on, or of as many as the file has. Blocks. Raises OSError."""
    # Reuse one buffer for all pieces: fresh pages for each would cost more than the checksum. It is not kept
    # per thread, because gRPC's threads are destroyed after each call.
    buffer = np.empty(min(length, _PIECE_BYTES), np.uint8)
    view, crc, end = buffer.data, 0, offset + length
    while offset < end and (size := os.preadv(fd, [view[: end - offset]], offset)):
        crc = google_crc32c.extend(crc, buffer[:size])
        offset += size
    return int(crc)

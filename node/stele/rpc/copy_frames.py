"""Pieces of a copied file as Arrow record batches of one row: offset, CRC-32C and bytes. Reads no files.

Neither direction copies the bytes: a batch refers to the buffer that it was made from or arrived in.
Invariant: a batch that is not such a frame is refused. The receiver compares the checksum.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from stele.model.errors import Code, Rejected

FRAMES = pa.schema(
    [
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("crc32c", pa.uint32(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)

_OFFSET, _CRC, _ENDS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<qq")


def frame_to_batch(offset: int, data: bytes, crc32c: int) -> pa.RecordBatch:
    """A batch for `data`, which is `offset` bytes from the beginning of its file."""
    ends = pa.py_buffer(_ENDS.pack(0, len(data)))
    return pa.RecordBatch.from_arrays(
        [
            pa.Array.from_buffers(pa.uint64(), 1, [None, pa.py_buffer(_OFFSET.pack(offset))]),
            pa.Array.from_buffers(pa.uint32(), 1, [None, pa.py_buffer(_CRC.pack(crc32c))]),
            pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(data)]),
        ],
        schema=FRAMES,
    )


def frame_from_batch(batch: pa.RecordBatch) -> tuple[int, pa.Buffer, int]:
    """(offset, bytes, CRC-32C) from a frame that arrived.

    Raises:
        Rejected: UNSUPPORTED_VERSION: it is not a frame.
    """
    if batch.num_rows != 1 or batch.schema != FRAMES or any(column.null_count for column in batch.columns):
        raise Rejected(
            f"the source sent {batch.num_rows} rows of {batch.schema.names}; expected one frame of "
            f"{FRAMES.names}; upgrade the older side",
            code=Code.UNSUPPORTED_VERSION,
        )
    offset, crc32c, data = (column[0] for column in batch.columns)
    return offset.as_py(), data.as_buffer(), crc32c.as_py()

"""The rows that are written: 100 bytes each, with two narrow columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema

TABLETS = 8
ROW_BYTES = 100
TEXT_BYTES = ROW_BYTES - 8 - 8 - 4

SCHEMA = Schema.make(
    [("id", "int64"), ("amount", "double"), ("kind", "int32"), ("text", "string")],
    ["id"],
)
PARTITIONING = PartitionSchema((HashPartition((0,), TABLETS),))
ONE_TABLET = PartitionSchema()
NARROW = ["amount", "kind"]


def batches(rows: int, batch_rows: int, seed: int = 1) -> list[pa.RecordBatch]:
    """`rows` rows with ids in random order, all different."""
    chosen = np.random.default_rng(seed)
    ids = chosen.permutation(rows).astype(np.int64)
    letters = chosen.integers(97, 123, size=(batch_rows, TEXT_BYTES), dtype=np.uint8)
    offsets = np.arange(0, (batch_rows + 1) * TEXT_BYTES, TEXT_BYTES, dtype=np.int32)
    text = pa.StringArray.from_buffers(batch_rows, pa.py_buffer(offsets), pa.py_buffer(letters.tobytes()))
    found = []
    for start in range(0, rows, batch_rows):
        part = ids[start : start + batch_rows]
        found.append(
            pa.record_batch(
                [part, part * 0.5, (part % 1_000).astype(np.int32), text.slice(0, len(part))],
                schema=SCHEMA.to_arrow(),
            )
        )
    return found


def row(number: int) -> dict[str, object]:
    """One row of 100 bytes."""
    return {"id": number, "amount": number * 0.5, "kind": number % 1_000, "text": "x" * TEXT_BYTES}

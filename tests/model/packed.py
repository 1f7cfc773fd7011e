"""Blocks with compressed buffers, as programs of others may make them; ours never did."""

from __future__ import annotations

import pyarrow as pa

from stele.model.block import HEADER, RowOp, decode_block, encode_block
from stele.model.schema import Schema


def compressed(block: bytes, schema: Schema, codec: str) -> bytes:
    """The same block, of one operation, with its buffers compressed."""
    found = decode_block(block, schema, trusted=True)
    return compressed_rows(found.op or RowOp.UPSERT, found.column_ids, found.batch, codec)


def compressed_rows(op: RowOp, column_ids: tuple[int, ...], batch: pa.RecordBatch, codec: str) -> bytes:
    """A block of these rows, whose size it may have the header of only: they may be many."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()  # the schema, which a block does not carry
    front = encode_block(op, column_ids, batch.slice(0, 0), 1)[: HEADER.size + 4 * len(column_ids)]
    front = front[:8] + batch.num_rows.to_bytes(4, "little") + front[12:]
    return front + bytes(-len(front) % 8) + messages.read_next_message().serialize().to_pybytes()

"""Reads Arrow data from others: keys of reads, values of predicates, answers of nodes. Opens no files.

Arrow trusts the offsets in a batch; one that points outside its buffer can end the process. `validate()`
without `full` checks only lengths and last offsets, so such a batch may pass it.

Invariant: a batch from here is safe to read, and takes no more memory than its message.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from stele.model.errors import Rejected

_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3
"""Numbers of the fields of Message and RecordBatch in Arrow's Message.fbs."""
_OFFSET, _SIGNED_OFFSET, _SHORT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_BUFFER = struct.Struct("<qq")
_BARE = {pa.lib.Type_STRING: pa.binary(), pa.lib.Type_LARGE_STRING: pa.large_binary()}
"""The types of strings without the promise that they are UTF-8."""


def read_batch(raw: bytes | memoryview | pa.Buffer, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """Read the batch in an Arrow IPC record batch message. It uses the memory of `raw`. `what` names the message
    in errors.

    Raises:
        Rejected: the bytes are no such message with these columns, or its offsets are wrong. Compressed
            messages are refused too, because they may expand a thousandfold.
    """
    try:
        body = pa.py_buffer(raw)
        message = pa.ipc.read_message(body)
        version, kind = message.metadata_version, message.type
        if version != pa.ipc.MetadataVersion.V5 or kind != "record batch":  # V4 has its compression elsewhere
            raise Rejected(
                f"{what}: an Arrow {kind} message of {version.name}; expected a record batch of V5"
            )
        _check_buffers(message.metadata, body.size, what)
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError) as exc:
        raise Rejected(
            f"{what}: {exc}; expected an Arrow record batch message of columns {', '.join(schema.names)}"
        ) from exc
    return batch


def ensure_safe(batch: pa.RecordBatch) -> None:
    """Check that no array points outside its memory. Use it for many rows from a trusted sender.

    It does not check the contents of strings and decimals, because that takes as long as reading them.

    Raises:
        pa.ArrowInvalid: an array is not safe to read.
    """
    for array in batch.columns:
        bare = _BARE.get(array.type.id)
        if pa.types.is_decimal(array.type):
            array.validate()
        else:
            (array if bare is None else array.view(bare)).validate(full=True)


def _check_buffers(metadata: pa.Buffer, size: int, what: str) -> None:
    """Refuse a message with buffers that are compressed or share bytes. Arrow has checked the metadata's
    offsets."""
    data = memoryview(metadata)
    header = _field(data, _OFFSET.unpack_from(data)[0], _HEADER)
    if not header:
        return
    batch = header + _OFFSET.unpack_from(data, header)[0]
    if _field(data, batch, _COMPRESSION):
        raise Rejected(f"{what}: the Arrow message has compressed buffers; send it uncompressed")
    buffers = _field(data, batch, _BUFFERS)
    if not buffers:
        return
    start = buffers + _OFFSET.unpack_from(data, buffers)[0] + 4
    end = start + _BUFFER.size * _OFFSET.unpack_from(data, start - 4)[0]
    if sum(abs(length) for _, length in _BUFFER.iter_unpack(data[start:end])) > size:
        raise Rejected(f"{what}: columns of the Arrow message share their bytes; each must have its own")


def batch_places(data: memoryview) -> tuple[int, int, int, int]:
    """Return four byte offsets in the metadata of one of our record batch messages. In order, they are those of
    the body's length, the number of rows, the first field node and the first buffer."""
    message = _OFFSET.unpack_from(data)[0]
    header = _field(data, message, _HEADER)
    batch = header + _OFFSET.unpack_from(data, header)[0]
    nodes, buffers = (_field(data, batch, number) for number in (_NODES, _BUFFERS))
    first = [at + _OFFSET.unpack_from(data, at)[0] + 4 for at in (nodes, buffers)]
    return _field(data, message, _BODY_LENGTH), _field(data, batch, _LENGTH), first[0], first[1]


def _field(data: memoryview, table: int, number: int) -> int:
    """The place of a field of a FlatBuffers table; 0 if it is absent."""
    vtable = table - _SIGNED_OFFSET.unpack_from(data, table)[0]
    if 4 + 2 * number >= _SHORT.unpack_from(data, vtable)[0]:
        return 0
    at = _SHORT.unpack_from(data, vtable + 4 + 2 * number)[0]
    return table + at if at else 0

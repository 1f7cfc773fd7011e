"""Arrow data that others made: keys of reads, values of predicates, what nodes answer. Opens no files.

Arrow trusts the offsets within a batch, and ends the process where one points outside of its buffer. A batch that is
merely valid by its lengths and last offsets (`validate()` without `full`) may still do that.

Invariant: the memory of a batch that comes out of here is safe to read, and takes no more of it than its message does.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from stele.model.errors import Rejected

_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3
"""Fields of Message, and of RecordBatch, in Arrow's Message.fbs, by their number."""
_OFFSET, _SIGNED_OFFSET, _SHORT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_BUFFER = struct.Struct("<qq")
_BARE = {pa.lib.Type_STRING: pa.binary(), pa.lib.Type_LARGE_STRING: pa.large_binary()}
"""What strings are, but for the promise that they are UTF-8."""


def read_batch(raw: bytes | memoryview | pa.Buffer, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """The batch in an Arrow IPC record batch message, whose memory it goes on using. `what` is for people.

    Raises:
        Rejected: no such message of these columns; one whose insides do not hold; a compressed one, which may be a
            thousand times as large as it looks.
    """
    try:
        body = pa.py_buffer(raw)
        message = pa.ipc.read_message(body)
        version, kind = message.metadata_version, message.type
        if (
            version != pa.ipc.MetadataVersion.V5 or kind != "record batch"
        ):  # in V4 compression may stand elsewhere
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
    """For many rows of one who is believed: that nothing points outside of its memory. What strings and decimals hold is not
    looked at, which would take as long as reading them.

    Raises:
        pa.ArrowInvalid: an array that is not safe to read.
    """
    for array in batch.columns:
        bare = _BARE.get(array.type.id)
        if pa.types.is_decimal(array.type):
            array.validate()
        else:
            (array if bare is None else array.view(bare)).validate(full=True)


def _check_buffers(metadata: pa.Buffer, size: int, what: str) -> None:
    """Refuse a message whose buffers are compressed, or share their bytes. Arrow has checked that its metadata are a table
    whose offsets hold."""
    data = memoryview(metadata)
    header = _field(data, _OFFSET.unpack_from(data)[0], _HEADER)
    if not header:
        return
    batch = header + _OFFSET.unpack_from(data, header)[0]
    if _field(data, batch, _COMPRESSION):
        raise Rejected(f"{what}: an Arrow message with compressed buffers; expected none")
    buffers = _field(data, batch, _BUFFERS)
    if not buffers:
        return
    start = buffers + _OFFSET.unpack_from(data, buffers)[0] + 4
    end = start + _BUFFER.size * _OFFSET.unpack_from(data, start - 4)[0]
    if sum(abs(length) for _, length in _BUFFER.iter_unpack(data[start:end])) > size:
        raise Rejected(
            f"{what}: an Arrow message whose columns share their bytes; expected each to have its own"
        )


def batch_places(data: memoryview) -> tuple[int, int, int, int]:
    """Where in the metadata of a record batch message of our own making stand the length of its body, how many rows it has, and
    the first of its nodes and of its buffers."""
    message = _OFFSET.unpack_from(data)[0]
    header = _field(data, message, _HEADER)
    batch = header + _OFFSET.unpack_from(data, header)[0]
    nodes, buffers = (_field(data, batch, number) for number in (_NODES, _BUFFERS))
    first = [at + _OFFSET.unpack_from(data, at)[0] + 4 for at in (nodes, buffers)]
    return _field(data, message, _BODY_LENGTH), _field(data, batch, _LENGTH), first[0], first[1]


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a FlatBuffers table is, 0 if it is absent."""
    vtable = table - _SIGNED_OFFSET.unpack_from(data, table)[0]
    if 4 + 2 * number >= _SHORT.unpack_from(data, vtable)[0]:
        return 0
    at = _SHORT.unpack_from(data, vtable + 4 + 2 * number)[0]
    return table + at if at else 0

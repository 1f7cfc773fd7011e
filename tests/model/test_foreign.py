"""Arrow messages that others made: what is broken or compressed is refused before anything reads it."""

from __future__ import annotations

import base64
import json

import numpy as np
import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.foreign import read_batch
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema

NAMES = pa.schema([("name", pa.string())])
SCHEMA = Schema.make([("name", "string")], ["name"])


def message(batch: pa.RecordBatch, codec: str | None = None) -> bytes:
    """A record batch message without its schema."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()  # the schema
    return bytes(messages.read_next_message().serialize().to_pybytes())


def batch_of(*names: str | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(names, pa.string())], schema=NAMES)


def broken() -> pa.RecordBatch:
    """The one in the middle ends far away."""
    offsets = np.array([0, 4, 1 << 30, 12], np.int32)
    names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
    return pa.RecordBatch.from_arrays([names], schema=NAMES)


def test_what_is_whole_comes_back() -> None:
    for batch in (batch_of("a", None, "b" * 1_000), batch_of()):
        assert read_batch(message(batch), NAMES, "keys") == batch
    none = pa.RecordBatch.from_pylist([], pa.schema([]))
    assert read_batch(message(none), none.schema, "keys") == none


def test_what_is_broken_is_refused() -> None:
    good = message(batch_of("a", "b", "c"))
    with pytest.raises(
        Rejected, match=r"keys: .*offset.*expected an Arrow record batch message of columns name"
    ):
        read_batch(message(broken()), NAMES, "keys")
    for bad in (*(good[:end] for end in range(0, len(good), 8)), b"x" * 100, NAMES.serialize().to_pybytes()):
        with pytest.raises(Rejected, match="keys: "):
            read_batch(bad, NAMES, "keys")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_is_compressed_is_refused(codec: str) -> None:
    """A few kilobytes may be a gigabyte."""
    packed = message(batch_of("x" * 1_000_000), codec)
    assert len(packed) < 10_000
    with pytest.raises(Rejected, match="compressed"):
        read_batch(packed, NAMES, "keys")


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_predicate_s_values_are_read_as_carefully(codec: str | None) -> None:
    raw = json.loads(ScanSpec(predicates=(Predicate(0, "=", "a"),)).to_json(SCHEMA))
    bad = broken() if codec is None else batch_of("x" * 1_000_000)
    raw["predicates"][0][2] = base64.b64encode(message(bad, codec)).decode()
    with pytest.raises(Rejected, match="predicate on name: "):
        ScanSpec.from_json(json.dumps(raw), SCHEMA)

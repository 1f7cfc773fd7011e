"""Writes the parts of column files of format 2: chooses a layout for each, and a codec. Opens no files; called by
colwriter.py.

Invariant: what decoding.py reads is what was written here, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model import keys as key_bytes
from stele.tablet.colformat import DICTIONARY, FIXED, NARROW, PLAIN, padded
from stele.tablet.decoding import (
    CODECS,
    COMPRESSED,
    INDEX_BITS,
    INDEXED,
    LZ4,
    NARROWED,
    NO_NULL,
    OF_ONE_LENGTH,
    RAW_BYTES_MAX,
    ZSTD,
    is_text,
    numbers,
    read_only,
)

_KEPT_MAX = {LZ4: 0.5, ZSTD: 0.4}
"""A part is compressed only if it shrinks to this share of its size. Reading zstd costs five times as much as LZ4. So
zstd is tried on text alone, and only where LZ4 does not gain enough."""
_MESSAGE_BYTES = 256
"""An Arrow message of one column takes about this much beside the column."""
_SAMPLE_ROWS, _SAMPLE_BYTES = 1_024, 64 << 10
_DICTIONARY_MAX = 1 << 16
_EQUAL_BITS = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of a part: `head`, then `body`, which may share the column's memory. `plain_bytes`: about how many
    bytes format 1 would take. `distinct`: the values that occur, if the writer has found them."""

    form: int
    head: bytes
    body: memoryview
    plain_bytes: int
    distinct: pa.Array | None = None

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self.head) + len(self.body)

    @property
    def data(self) -> memoryview:
        """Its bytes in one piece."""
        return memoryview(self.head + self.body) if self.head else self.body


def message(array: pa.Array, schema: pa.Schema) -> memoryview:
    """An Arrow record batch message with this column."""
    # Written at once, so that a copy of a slice's parent is freed soon.
    return memoryview(pa.RecordBatch.from_arrays([array], schema=schema).serialize())


def unchanged(data: memoryview) -> Encoded:
    """A part as format 1 has it."""
    return Encoded(PLAIN, b"", data, len(data))


def encode(array: pa.Array, schema: pa.Schema, *, compress: bool) -> Encoded:
    """A column in the layout that takes the fewest bytes. `compress`: compress it, too, where a sample and then the
    result show that this gains enough. `schema`: of the column's Arrow message."""
    plain_bytes = array.nbytes + _MESSAGE_BYTES
    form, head, body, distinct = _few_bytes(array, plain_bytes) or (PLAIN, b"", message(array, schema), None)
    found = Encoded(form, head, body, plain_bytes, distinct)
    if compress and found.size <= RAW_BYTES_MAX:
        codecs = (LZ4, ZSTD) if form != DICTIONARY and is_text(array.type) else (LZ4,)
        return _compressed(found, codecs)
    return found


def encode_keys(keys: pa.BinaryArray, schema: pa.Schema) -> Encoded:
    """A group's keys. They are never compressed, because each point read looks at some of them."""
    form, head, body, _ = _fixed(keys) or (PLAIN, b"", message(keys, schema), None)
    return Encoded(form, head, body, keys.nbytes + _MESSAGE_BYTES)


def encode_times(times: npt.NDArray[np.uint64]) -> Encoded:
    """A group's hybrid times, as a dictionary where that is shorter: all rows of an entry share one time. PLAIN is the
    bare numbers. Times are never compressed, so no group has more rows than its file has bytes."""
    laid = _dictionary(pa.array(times), 3 * times.nbytes // 4)
    form, head, body, _ = laid or (PLAIN, b"", times.view(np.uint8).data, None)
    return Encoded(form, head, body, times.nbytes)


_Laid = tuple[int, bytes, memoryview, pa.Array | None] | None
"""A form, a head, a body, and the values that occur, if they are known. None: this layout does not pay."""


def _few_bytes(array: pa.Array, plain_bytes: int) -> _Laid:
    """The layout that takes the fewest bytes; None if PLAIN does. Each try costs the writer more than the one before."""
    narrow = _narrow(array)
    if narrow is not None and len(narrow[2]) == len(array):
        return narrow  # no index is shorter
    most = 3 * plain_bytes // 4 if narrow is None else NARROWED.size + len(narrow[2]) - 1
    return _dictionary(array, most) or narrow or _fixed(array)


def _narrow(array: pa.Array) -> _Laid:
    """Whole numbers as distances from the lowest one, in fewer bytes each; None if that saves nothing."""
    number = numbers(array.type)
    if number is None or array.null_count:
        return None
    _, buffer = array.buffers()
    values = np.frombuffer(buffer, number, len(array), array.offset * number.itemsize)
    low = int(values.min())
    above = int(values.max()) - low
    width = next((width for width in (1, 2, 4) if above < 1 << 8 * width), 8)
    if width >= number.itemsize:
        return None
    narrowed = np.empty(len(values), f"<u{width}")
    np.subtract(values, number.type(low), out=narrowed, casting="unsafe")
    return NARROW, NARROWED.pack(width, low), narrowed.view(np.uint8).data, None


def _dictionary(array: pa.Array, most: int) -> _Laid:
    """The values that occur, once each, and a short index for each row; None if that takes more than `most` bytes."""
    widest = 1 if most < INDEXED.size + 2 * len(array) else 2
    if _bits(array.type) <= INDEX_BITS or _distinct(array, 1 << 8 * widest):
        return None
    # By their bits, so that nothing depends on how Arrow compares zeros and NaNs.
    equal = _EQUAL_BITS.get(array.type)
    found = (array if equal is None else array.view(equal)).dictionary_encode(null_encoding="encode")
    values, count = found.dictionary, len(found.dictionary)
    if count > _DICTIONARY_MAX:
        return None
    width = 1 if count <= 1 << 8 else 2
    begin = padded(INDEXED.size + width * len(array))
    if begin + values.nbytes > most:
        return None
    null = values.is_null().index(True).as_py() if values.null_count else NO_NULL
    indices = found.indices.to_numpy().astype(f"<u{width}")
    between = bytes(begin - INDEXED.size - indices.nbytes)
    head = INDEXED.pack(width, count, null, begin)
    body = memoryview(b"".join((indices, between, *_value_bytes(values))))
    return DICTIONARY, head, body, values if equal is None else values.view(array.type)


def _bits(kind: pa.DataType) -> int:
    return 64 if is_text(kind) else int(kind.bit_width)


def _distinct(array: pa.Array, count_max: int) -> bool:
    """Whether a sample shows that a dictionary does not pay: most values are distinct.

    That is so if it has more than `count_max` distinct values, or more than nine for each ten of its rows. The whole
    column may still have values that repeat, if the sample has only some of its rows."""
    step = max(1, len(array) // _SAMPLE_ROWS)
    sample = array.take(pa.array(np.arange(0, len(array), step))) if step > 1 else array
    distinct: int = pc.count_distinct(sample, mode="all").as_py()
    return 10 * distinct > 9 * len(sample) or distinct > count_max


def _value_bytes(values: pa.Array) -> tuple[bytes, ...]:
    if is_text(values.type):
        offsets, data = key_bytes.binary_parts(values)
        begin, end = int(offsets[0]), int(offsets[-1])
        return (offsets - begin).tobytes(), data[begin:end].tobytes()
    width = values.type.bit_width // 8
    return (values.buffers()[1].slice(values.offset * width, len(values) * width).to_pybytes(),)


def _fixed(array: pa.Array) -> _Laid:
    """Text of one length, without an offset for each value; None if the lengths differ."""
    if not is_text(array.type) or array.null_count:
        return None
    offsets, data = key_bytes.binary_parts(array)
    begin, end = int(offsets[0]), int(offsets[-1])
    length = int(offsets[1]) - begin if len(array) else 0
    if not length or end - begin != length * len(array) or (np.diff(offsets) != length).any():
        return None
    return FIXED, OF_ONE_LENGTH.pack(length), data[begin:end].data, None


def _compressed(found: Encoded, codecs: Sequence[int]) -> Encoded:
    """The part, compressed by the first codec that gains enough on a sample and then on the whole. If none does, the
    part as it is."""
    sample = _middle(found.body)
    for codec in codecs:
        coder, share = CODECS[codec], _KEPT_MAX[codec]
        if len(coder.compress(sample)) > share * len(sample):
            continue
        data = found.data
        packed = coder.compress(data)
        if COMPRESSED.size + packed.size <= share * len(data):
            head = COMPRESSED.pack(len(data), google_crc32c.value(read_only(data)), 0)
            body = memoryview(packed.to_pybytes())
            return Encoded(found.form | codec << 8, head, body, found.plain_bytes, found.distinct)
    return found


def _middle(data: memoryview) -> memoryview:
    start = max(0, (len(data) - _SAMPLE_BYTES) // 2)
    return data[start : start + _SAMPLE_BYTES]

"""Stele hash v1 and the row checksum never change: golden vectors; one value and many agree."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model import hashing
from stele.model.checksum import MASK, checksum
from stele.model.schema import Schema

GOLDEN = {
    (b"", 0): 0x0000000000000000,
    (b"a", 0): 0xDD0E0FCEEFC5D1F9,
    (b"12345678", 0): 0xD0B2EA1499E6A134,
    (b"123456789", 0): 0x87F4761E2B0FA4A1,
    (b"123456789", 7): 0xAB6377ECC0E00335,
    (bytes(range(100)), 4294967295): 0x618C55E5A94F9149,
}


def test_golden_vectors() -> None:
    for (value, seed), wanted in GOLDEN.items():
        assert hashing.hash_bytes(value, seed) == wanted


@given(st.lists(st.binary(max_size=40), min_size=1), st.integers(0, 2**64 - 1))
def test_one_value_and_many_hash_alike(values: list[bytes], seed: int) -> None:
    array = pa.array([b"before", *values], pa.binary()).slice(1)
    assert hashing.hash_binary(array, seed).tolist() == [hashing.hash_bytes(v, seed) for v in values]


@given(st.integers(1, 20), st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_values_of_one_length_hash_as_each_alone(width: int, raw: bytes, seed: int) -> None:
    rows = np.frombuffer(raw, np.uint8, len(raw) // width * width).reshape(-1, width)
    assert hashing.hash_rows(rows, seed).tolist() == [hashing.hash_bytes(row.tobytes(), seed) for row in rows]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(st.data(), st.integers(0, 2**64 - 1))
def test_integers_hash_as_their_key_bytes(width: int, data: st.DataObject, seed: int) -> None:
    bias = 1 << (8 * width - 1)
    values = data.draw(st.lists(st.integers(-bias, bias - 1), min_size=1, max_size=70))
    wanted = [hashing.hash_bytes((value + bias).to_bytes(width, "big"), seed) for value in values]
    assert hashing.hash_ints(values, width, seed) == wanted


LENGTHS = (0, 1, 8, 127, 128, 129, 136, 255, 256, 257, 300, 1024, 1025)


def test_long_values_and_short_ones_hash_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    values = [rng.bytes(length) for length in LENGTHS for _ in range(1 + length % 40)]
    rng.shuffle(values)  # type: ignore[arg-type]
    array = pa.array([None, *values], pa.binary()).slice(1)
    assert hashing.hash_binary(array, 7).tolist() == [hashing.hash_bytes(v, 7) for v in values]


def test_one_long_value_among_many_costs_its_own_bytes() -> None:
    """It cost its length in every row: a key of 8,000 bytes among 300,000 in memory took a node 2 GB and ten seconds."""
    short = [b"key %06d" % n for n in range(10_000)]
    array = pa.array([*short, bytes(64_000)], pa.binary())
    tracemalloc.start()
    found = hashing.hash_binary(array)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert found[:2].tolist() == [hashing.hash_bytes(v) for v in short[:2]]
    assert int(found[-1]) == hashing.hash_bytes(bytes(64_000))


SCHEMA = Schema.make(
    [
        ("k", "int64"),
        ("s", "string", True),
        ("b", "bool", True),
        ("f", "float", True),
        ("c", "decimal(9,2)", True),
        ("d", "date", True),
        ("t", "timestamp", True),
        ("y", "binary", True),
        ("g", "double", True),
        ("i", "int8", True),
    ],
    ["k"],
)


def _batch(rows: list[int]) -> pa.RecordBatch:
    import datetime
    import decimal

    def row(n: int) -> dict[str, object]:
        if n % 3 == 0:
            return {"k": n}
        return {
            "k": n,
            "s": "x" * n,
            "b": n % 2 == 0,
            "f": n / 2,
            "c": decimal.Decimal(n) / 4,
            "d": datetime.date(1970, 1, 1 + n),
            "t": datetime.datetime(1970, 1, 1, 0, 0, n, tzinfo=datetime.UTC),
            "y": bytes(n),
            "g": float("nan") if n == 1 else -0.0 if n == 2 else n / 3,
            "i": -n,
        }

    return pa.RecordBatch.from_pylist([row(n) for n in rows], schema=SCHEMA.to_arrow())


def test_a_checksum_forgets_order_and_batches_but_no_value() -> None:
    whole = checksum(_batch(list(range(9))), SCHEMA)
    assert whole == 0xA8B6493A5D098669
    parts = [_batch([8, 3, 1]), _batch([0, 2]).slice(1), _batch([0]), _batch(list(range(9))).slice(4, 4)]
    assert sum(checksum(p, SCHEMA) for p in parts) & MASK == whole
    assert checksum(_batch([*range(8), 9]), SCHEMA) != whole
    batch = _batch([1, 2, 4])
    for at, column in enumerate(SCHEMA.columns[1:], start=1):
        nulls = batch.set_column(at, batch.schema.field(at), pa.nulls(3, column.arrow))
        assert checksum(nulls, SCHEMA) != checksum(batch, SCHEMA), column.name

"""Files of rows as they are written: no cluster."""

from __future__ import annotations

import datetime as dt
import decimal
import io

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stele.backup.row_files import ParquetRows

ROWS = 40_000
COLUMNS = {
    "id": pa.array(range(ROWS), pa.int64()),
    "name": [f"name {n * 7919 % ROWS}" for n in range(ROWS)],
    "price": [decimal.Decimal(n) / 100 for n in range(ROWS)],
    "carrier": [("UA", "DL", "AA")[n % 3] for n in range(ROWS)],
    "day": [dt.date(2024, 1, 1) + dt.timedelta(days=n // 200) for n in range(ROWS)],
    "none": pa.nulls(ROWS, pa.string()),
    "ok": [n % 2 == 0 for n in range(ROWS)],
}


def written(rows: pa.Table, batch_rows: int = 8_192) -> bytes:
    sink = io.BytesIO()
    file = ParquetRows(sink, rows.schema)
    for batch in rows.to_batches(batch_rows):
        file.write(batch)
    file.close()
    return sink.getvalue()


def test_columns_whose_values_repeat_get_a_dictionary_and_no_others() -> None:
    rows = pa.table(COLUMNS)
    raw = written(rows)
    with parquet.ParquetFile(io.BytesIO(raw)) as file:
        chunks = [file.metadata.row_group(0).column(n) for n in range(rows.num_columns)]
        assert file.read().equals(rows)
    of_dictionary = {chunk.path_in_schema for chunk in chunks if "RLE_DICTIONARY" in chunk.encodings}
    assert of_dictionary - {"ok"} == {"carrier", "day", "none"}  # Parquet has none for booleans


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_are_written_as_they_are(count: int) -> None:
    rows = pa.table(COLUMNS).slice(0, count)
    assert parquet.read_table(io.BytesIO(written(rows))).equals(rows)

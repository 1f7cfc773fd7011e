"""What `table scan -o` writes: by its suffix, whole under its name or not there, and nothing is replaced unasked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as parquet
import pytest

from stele.cli.new_file import new_file
from stele.model.amounts import byte_size
from stele.model.errors import Code, Retryable
from tests.client.commands import runner
from tests.client.small import EIGHT, SCHEMA, small_cluster

ROWS = 20_000


async def test_the_suffix_says_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with small_cluster(tmp_path / "data") as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        data = pa.table(
            {"id": np.arange(ROWS), "name": [f"n{i}" for i in range(ROWS)], "n": np.arange(ROWS) % 7}
        )
        await table.write_arrow(data)
        run = runner(cluster, monkeypatch)
        for suffix in ("parquet", "csv", "arrow", "json"):
            path = tmp_path / f"rows.{suffix}"
            code, out, err = await run("table", "scan", "t", "-o", str(path))
            assert (code, out) == (0, "")
            size = byte_size(path.stat().st_size)
            assert err.startswith(f"{ROWS:,} rows, {size}, in ") and err.endswith(f" s, written to {path}\n")
            if suffix == "parquet":
                found = parquet.read_table(path)
                assert found.schema == table.arrow_schema
                assert parquet.read_metadata(path).num_row_groups == 1
            elif suffix == "csv":
                found = pa_csv.read_csv(path)
            elif suffix == "arrow":
                found = pa.ipc.open_stream(path.read_bytes()).read_all()
            else:
                found = pa.Table.from_pylist([json.loads(line) for line in path.read_text().splitlines()])
            assert found.sort_by("id")["n"].to_pylist() == data["n"].to_pylist(), suffix
        path = tmp_path / "rows.parquet"
        code, _, err = await run("table", "scan", "t", "--limit", "1", "-o", str(path))
        assert code == 2 and f"{path} exists already; --force replaces it" in err
        assert parquet.read_metadata(path).num_rows == ROWS
        assert (await run("table", "scan", "t", "--limit", "1", "--force", "-o", str(path)))[0] == 0
        assert parquet.read_metadata(path).num_rows == 1
        code, _, err = await run("table", "scan", "t", "--format", "parquet")
        assert code == 2 and "Parquet needs a file" in err
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "data",
            *(f"rows.{suffix}" for suffix in ("arrow", "csv", "json", "parquet")),
        ]


async def test_of_a_scan_that_fails_no_file_is_left_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path / "data") as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        await table.write_arrow(pa.table({"id": np.arange(ROWS)}))
        run = runner(cluster, monkeypatch)
        there = tmp_path / "there.csv"
        there.write_text("before")
        for path, force in ((tmp_path / "new.csv", ()), (there, ("--force",))):
            for node in cluster.nodes:
                node.flight_fault.clear()
                node.flight_fault.append(lambda _: Retryable("a fault", code=Code.UNSUPPORTED_VERSION))
            code, _, err = await run("table", "scan", "t", "-o", str(path), *force)
            assert code != 0, err
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["there.csv"]
        assert there.read_text() == "before"


def test_a_link_stays_one_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    link.symlink_to(real)
    with new_file(str(link)) as file:
        file.write(b"after")
        assert real.read_text() == "before"
    assert link.is_symlink() and real.read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with new_file(str(tmp_path / "pipe")) as file:
            file.write(b"x")
        assert os.read(reading, 10) == b"x"
    finally:
        os.close(reading)

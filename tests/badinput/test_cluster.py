"""Bad rows and bad files through `stele table load`, on real processes: told, and the rest goes on."""

from __future__ import annotations

from pathlib import Path

from stele.client import AsyncClient
from stele.model.schema import Schema
from tests.harness import Cluster
from tests.harness.commands import stele

SCHEMA = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])


async def test_bad_rows_and_bad_files(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=1) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        rows = tmp_path / "t.csv"
        rows.write_text("id,n\n1,1\n,2\n4,4\n9,many\n\n4,5\n6\n7,7\n")
        code, out = await stele(cluster, "table", "load", "t", str(rows), "--op", "insert")
        assert code == 2 and "3 rows written" in out, out
        assert "t.csv line 3: INVALID_ARGUMENT column id is null" in out, out
        assert "t.csv line 5: INVALID_ARGUMENT column n: 'many' is not an int32" in out, out
        assert "t.csv line 7: ALREADY_PRESENT" in out, out
        assert "t.csv line 8: INVALID_ARGUMENT 1 values; expected 2" in out, out
        assert out.endswith("4 of 7 rows were refused; the others were written\n"), out
        garbage = tmp_path / "t.parquet"
        garbage.write_bytes(b"garbage" * 100)
        code, out = await stele(cluster, "table", "load", "t", str(garbage))
        assert code == 2 and str(garbage) in out.replace("\n", "") and "Traceback" not in out, out
        assert await table.scan().count() == 3

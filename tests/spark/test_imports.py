"""What each Python worker of Spark imports: what it needs to read and write, and no more."""

from __future__ import annotations

import subprocess
import sys

NEEDLESS = (
    "stele.backup",
    "stele.client.admin",
    "stele.driver",
    "stele.tserver",
    "stele.master",
    "kubernetes",
)


def test_a_worker_imports_neither_backups_nor_what_changes_clusters() -> None:
    """Spark starts several for each load() and save(), and each imports the data source anew."""
    program = "import sys, pyspark_stele; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert "stele_spark.sink" in imported and not {*NEEDLESS} & {*imported}

"""Backups whose tasks run in a real Spark, with a real cluster: nodes and Python workers are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stele
from stele.client import Client
from stele.model.errors import Code, Rejected
from tests.backup.tables import NUMBERS, bits, data_files
from tests.harness.processes import Cluster

pytestmark = pytest.mark.spark

SESSION = {"spark__master": "local[2,4]", "spark__speculation": "true"}
PYTHON_ANEW = True  # what is killed is found by its command line
ROWS = 600_000


def parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        found[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def python_workers() -> list[int]:
    """Spark's Python workers below this process: children of its daemon."""
    of = parents()

    def is_ours(pid: int) -> bool:
        while pid in of:
            pid = of[pid]
            if pid == os.getpid():
                return True
        return False

    def is_daemon(pid: int) -> bool:
        try:
            return b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return [pid for pid, parent in of.items() if is_daemon(parent) and is_daemon(pid) and is_ours(pid)]


class KillsWorkers(threading.Thread):
    """Kills Spark's Python workers once one has begun a file of a backup."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.killed: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.killed and not self.over.wait(0.002):
            if any(self._folder.glob("2*/*/*.parquet")):
                for pid in python_workers():
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)


def failed_tasks(spark: Any) -> int:
    """How many attempts at tasks have failed so far."""
    tracker = spark.sparkContext.statusTracker()
    stages = {stage for job in tracker.getJobIdsForGroup(None) for stage in tracker.getJobInfo(job).stageIds}
    return sum(info.numFailedTasks for stage in stages if (info := tracker.getStageInfo(stage)) is not None)


@pytest.mark.filterwarnings("default")
def test_a_backup_and_a_restore_outlast_killed_tasks_and_nodes(
    spark: Any, masters: str, processes: Cluster, tmp_path: Path
) -> None:
    from stele_spark import backup

    folder = tmp_path / "b"
    with Client(masters) as client:
        table = client.create_table("t", NUMBERS, stele.hash("id", buckets=6))
        table.write_arrow(pa.table({"id": np.arange(ROWS), "name": [f"n{i * 7919}" for i in range(ROWS)]}))
        before = bits(table.scan(ordered=True).to_table())
        down: list[Any] = []

        def kill_once(number: int) -> None:
            if not down:
                down.append(processes.members[number])
                processes.kill(down[0])

        told = []
        killer = KillsWorkers(folder)
        killer.start()
        try:
            made = backup.create(
                spark,
                masters,
                folder,
                "t",
                on_progress=lambda now: (told.append(now), kill_once(-1) if now.tablets_done else None),
            )
        finally:
            killer.over.set()
            killer.join()
        assert killer.killed and failed_tasks(spark) >= 1, "a task was tried again"
        assert down and made.rows == ROWS == told[-1].rows and told[-1].tablets_done == 6
        assert len(data_files(folder, made.backup_id)) == 6, "what the killed attempts left is gone"
        report = backup.verify(spark, folder)
        assert (report.faults, report.strays, report.tables[0].rows) == ([], [], ROWS)

        processes.launch(down.pop())
        table.delete({"id": 5})
        differing = backup.compare(spark, masters, folder)
        assert differing.differences == [], "it is read as it was"
        client.delete_table("t")
        backup.restore(spark, masters, folder, on_rows=lambda name, count: kill_once(-2))
        assert down
        assert bits(client.open_table("t").scan(ordered=True).to_table()) == before
        assert backup.compare(spark, masters, folder).differences == []
        processes.launch(down.pop())

        with pytest.raises(Rejected) as refused:
            backup.restore(spark, masters, folder)
        assert refused.value.code is Code.ALREADY_PRESENT
        client.open_table("t").put({"id": 1, "name": "other"})
        (difference, _) = [*backup.compare(spark, masters, folder).differences, ""][:2]
        assert "as many rows, but other values" in difference

        hurt = data_files(folder, made.backup_id)[2]
        raw = bytearray(hurt.read_bytes())
        raw[len(raw) // 2] ^= 1
        hurt.write_bytes(raw)
        (fault,) = backup.verify(spark, folder).faults
        assert hurt.name in fault and "damaged" in fault
        with pytest.raises(stele.Corrupt, match="damaged"):
            backup.restore(spark, masters, folder, tables={"t": "again"})
        assert [info.name for info in client.list_tables()] == ["t"], "nothing half restored is left"


def program(name: str, *arguments: str | Path, submit: bool = False) -> tuple[int, str, str]:
    """Runs one of the programs, as installed or by spark-submit: exit status, output, lines of errors."""
    from stele_spark import apps
    from stele_spark.session import find_java_home

    file = Path(apps.__file__).parent / f"{name}.py"
    begin = [sys.executable, "-m", f"stele_spark.apps.{name}"]
    if submit:
        import pyspark

        here = Path(pyspark.__file__).parent / "bin" / "spark-submit"
        begin = [str(here), "--master", "local[2,3]", "--conf", "spark.ui.enabled=false", str(file)]
    environment = {**os.environ, "JAVA_HOME": str(find_java_home()), "PYSPARK_PYTHON": sys.executable}
    environment |= {"PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [*begin, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.filterwarnings("default")
def test_the_programs_say_in_one_line_what_is_wrong(masters: str, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    status, out, told = program("verify", tmp_path / "nothing")
    assert (status, out, told.count("\n")) == (2, "", 1) and "there is no such folder" in told
    status, out, told = program("backup", folder, "nobody", "--masters", masters)
    assert (status, out, told.count("\n")) == (
        2,
        "",
        1,
    ) and "stele-backup: NOT_FOUND: no table nobody" in told
    with Client(masters) as client:
        table = client.create_table("small", NUMBERS, stele.hash("id", buckets=2))
        table.write_arrow(pa.table({"id": np.arange(1_000), "name": ["x"] * 1_000}))
    status, out, told = program(
        "backup", folder, "small", "--masters", masters, "--conf", "spark.master=local[2,3]"
    )
    assert status == 0 and "1,000 rows, 2 files" in out, told
    status, out, told = program("verify", folder, "--compare", "--masters", masters, submit=True)
    assert status == 0 and "is whole" in out, told
    (hurt, _) = data_files(folder, next(folder.glob("2*")).name)
    hurt.write_bytes(hurt.read_bytes()[:-1])
    status, out, told = program("restore", folder, "--table", "small=new", "--masters", masters, submit=True)
    last = out.rstrip().splitlines()[-1]  # spark-submit joins a program's output and errors
    assert status == 5 and last.startswith("stele-restore: CORRUPT: ") and hurt.name in last, told

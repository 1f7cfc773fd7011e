"""The programs for Spark as they are installed, with executors of a real standalone Spark and a bucket of a real S3 server."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import stele
from stele.client import Client
from stele_spark.submit import PROGRAMS, command, split
from tests.backup.tables import NUMBERS, bits
from tests.backup.test_s3 import SERVER, serving
from tests.harness.processes import Cluster
from tests.harness.standing import running
from tests.spark.standalone import environment, standalone

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]
ROWS = 20_000


def installed(folder: Path) -> list[str]:
    """Makes the programs that pyproject.toml names for Spark, as pip does it."""
    from pip._vendor.distlib.scripts import ScriptMaker

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    names = [name for name, entry in scripts.items() if entry.startswith("stele_spark.")]
    maker = ScriptMaker(None, str(folder), add_launchers=False)
    maker.executable, maker.variants = sys.executable, {""}
    for name in names:
        maker.make(f"{name} = {scripts[name]}")
    return sorted(names)


@pytest.mark.skipif(not SERVER.exists(), reason="needs a server of S3: make s3-server")
@pytest.mark.filterwarnings("default")
def test_executors_elsewhere_back_up_into_a_bucket_and_restore_from_it(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "most-secret", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    programs, work, env = tmp_path / "bin", tmp_path / "work", environment(**keys)
    programs.mkdir()
    work.mkdir()
    assert installed(programs) == [f"stele-{name}" for name in PROGRAMS]

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
        return done.returncode, done.stdout + done.stderr

    for name in PROGRAMS:
        status, told = run(str(programs / f"stele-{name}"), "--help")
        assert status == 0 and f"Usage: stele-{name} [OPTIONS] FOLDER" in told
    with pytest.MonkeyPatch.context() as patch:
        for key, value in keys.items():
            patch.setenv(key, value)
        with (
            serving() as options,
            standalone(work, env) as spark,
            running(Cluster(tmp_path / "cluster", masters=1, nodes=3)) as cluster,
        ):
            masters, folder = ",".join(cluster.master_addresses), f"s3://bucket/stele?{options}"
            with Client(masters) as client:
                table = client.create_table("t", NUMBERS, stele.hash("id", buckets=3))
                table.write_arrow(pa.table({"id": np.arange(ROWS), "name": [f"n{i}" for i in range(ROWS)]}))
                before = bits(table.scan(ordered=True).to_table())
            small = ("--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false")
            submit = (sys.executable, "-m", "stele_spark.submit", "--master", spark, *small)
            status, told = run(*submit, "backup", folder, "t", "--masters", masters)
            assert status == 0 and f"{ROWS:,} rows, 3 files" in told, told[-3_000:]
            assert list(work.glob("app-*/0")), "the worker's executor did the work"
            status, told = run(str(programs / "stele-verify"), folder, "--conf", "spark.master=local[2,3]")
            assert status == 0 and "is whole" in told, told[-3_000:]
            words = ("--table", "t=copy", "--masters", masters, "--conf", f"spark.master={spark}", *small)
            status, told = run(str(programs / "stele-restore"), folder, *words)
            assert status == 0 and f"restored table copy from t: {ROWS:,} rows" in told, told[-3_000:]
            with Client(masters) as client:
                assert bits(client.open_table("copy").scan(ordered=True).to_table()) == before
            assert len(list(work.glob("app-*/0"))) == 2


def test_what_stands_before_the_program_is_for_spark_and_the_rest_for_the_program() -> None:
    words = [
        "--master",
        "local[2]",
        "--conf=spark.a=b",
        "--verbose",
        "--name",
        "backup",
        "restore",
        "/b",
        "--verify",
    ]
    assert split(words) == (words[:6], "restore", ["/b", "--verify"])
    submit, *rest = command(words)
    assert submit.endswith("bin/spark-submit") and Path(submit).is_file()
    assert rest[6].endswith("apps/restore.py") and Path(rest[6]).is_file()
    for wrong in ([], ["--master"], ["--master", "x"], ["drill"]):
        with pytest.raises(ValueError, match="usage: "):
            split(wrong)


def test_an_executor_is_what_its_variables_say() -> None:
    from stele_spark.executor import command as executor

    given = {
        "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.1:7078", "SPARK_EXECUTOR_ID": "3", "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "spark-1", "SPARK_EXECUTOR_POD_IP": "10.0.0.2", "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "e-3", "SPARK_EXECUTOR_MEMORY": "1g", "SPARK_JAVA_OPT_0": "-Da=b", "SPARK_JAVA_OPT_1": "-Dc=d",
    }  # fmt: skip
    words = executor(Path("/java"), Path("/jars"), given)
    assert words[:7] == ["/java/bin/java", "-Da=b", "-Dc=d", "-Xms1g", "-Xmx1g", "-cp", "/jars/*"]
    assert words[words.index("--driver-url") + 1] == given["SPARK_DRIVER_URL"] and words[-2:] == [
        "--podName",
        "e-3",
    ]
    with pytest.raises(ValueError, match="not set in the environment: SPARK_DRIVER_URL"):
        executor(Path("/java"), Path("/jars"), given | {"SPARK_DRIVER_URL": ""})

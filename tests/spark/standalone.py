"""A real standalone Spark on loopback: a master, and workers on hosts of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_START_S = 180


def environment(**more: str) -> dict[str, str]:
    from stele_spark.session import find_java_home

    own = {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return {**os.environ, **own, **more}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def standalone(work: Path, env: dict[str, str], hosts: Sequence[str] = ("127.0.0.1",)) -> Iterator[str]:
    """A master of Spark, and a worker on each of these hosts of loopback; the master's URL.

    A worker has two cores, or one if there are several. The variable SPARK_LOCAL_IP of its processes is its host."""
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port = free_port()
    url, ours = f"spark://127.0.0.1:{port}", "org.apache.spark.deploy"
    master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
    # With one core on each of several hosts, executors of one core are on as many hosts, whichever worker comes first.
    cores = "1" if len(hosts) > 1 else "2"
    worker = ["--cores", cores, "--memory", "1g", "--work-dir", str(work), url]
    all_of_them = [
        (env, [f"{ours}.master.Master", *master]),
        *(
            (
                env | {"SPARK_LOCAL_IP": host},
                [f"{ours}.worker.Worker", "--host", host, "--webui-port", str(free_port()), *worker],
            )
            for host in hosts
        ),
    ]
    processes = []
    try:
        for its_env, words in all_of_them:
            with (work / f"{len(processes)}.log").open("wb") as log:
                processes.append(subprocess.Popen([spark_class, *words], env=its_env, stdout=log, stderr=log))
        until = time.monotonic() + _START_S
        while not answers(port):
            assert processes[0].poll() is None and time.monotonic() < until, "Spark's master did not start"
            time.sleep(0.1)
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""A worker of Spark that is forked is, for Spark, the program that it started; and nothing is left of either."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.harness.spark_python import forked_workers, spark_python

ROOT = Path(__file__).parents[2]
WITHIN_S = 120.0


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def daemon() -> tuple[subprocess.Popen[bytes], int]:
    """A daemon of PySpark, as Spark starts it, and the port at which it waits for orders to fork."""
    words = [spark_python(), "-m", "pyspark.daemon", "pyspark.worker"]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    return started, int.from_bytes(started.stdout.read(4), "big")


def test_a_daemon_ends_with_its_input_and_with_its_program() -> None:
    for end, code in (("input", 1), ("SIGKILL", -9)):  # 1 is what PySpark itself ends with
        started, port = daemon()
        with started:
            assert started.poll() is None and not refuses(port)
            if end == "input":
                assert started.stdin is not None
                started.stdin.close()
            else:
                started.kill()
            assert started.wait(WITHIN_S) == code, end
        until(partial(refuses, port), f"a daemon outlives its program, which {end} ended")


_WAITS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_sigterm_reaches_it(tmp_path: Path) -> None:
    """A module of our own: PySpark's daemon loses one that comes while it forks."""
    (tmp_path / "pyspark_waits.py").write_text(_WAITS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [spark_python(), "-m", "pyspark_waits"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as started:
        assert started.stdout is not None and started.stdout.readline() == b"ready\n"
        started.terminate()
        assert started.wait(WITHIN_S) == 5


_TELLS = """
import os, sys
print(os.getcwd() == sys.path[0] == sys.argv[1], os.environ["NAME"], sys.stdin.read(), "stele_spark.source" in sys.modules)
print("an error", file=sys.stderr)
sys.exit(7)
"""


def test_it_has_the_files_the_environment_and_the_folder_of_its_program(tmp_path: Path) -> None:
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "pyspark_tells.py").write_text(_TELLS)
    environment = {**os.environ, "NAME": "its own", "PYTHONPATH": str(modules)}

    def done(*words: str) -> tuple[int, str, str]:
        ended = subprocess.run(
            [spark_python(), *words],
            env=environment,
            cwd=folder,
            input="given",
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stdout, ended.stderr

    told = done("-m", "pyspark_tells", str(folder))
    assert told == (7, "True its own given True\n", "an error\n")
    assert done("-c", "import sys; print(6 * 7, 'stele' in sys.modules)") == (0, "42 False\n", "")


def test_sessions_are_given_it_for_a_time() -> None:
    before = os.environ.get("PYSPARK_PYTHON")
    with forked_workers():
        assert os.environ["PYSPARK_PYTHON"] == spark_python()
    assert os.environ.get("PYSPARK_PYTHON") == before


_MAKES_ONE = """
import time
from tests.harness.test_spark_python import daemon, spark_python
print(daemon()[1], spark_python(), flush=True)
time.sleep(600)
"""


def test_none_outlives_the_process_that_made_the_template() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", _MAKES_ONE]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as maker:
        assert maker.stdout is not None
        port, program = maker.stdout.readline().split()
        assert not refuses(int(port)) and Path(program).exists()
        maker.kill()
    until(partial(refuses, int(port)), "a daemon outlives who made its template")
    until(lambda: not Path(program).parent.exists(), "a folder outlives who made it")

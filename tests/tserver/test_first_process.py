"""Programs as the first process of a container: the kernel gives that one no SIGTERM that it has no handler for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
IMPORTED = """
import sys
print("imports", flush=True)
sys.stdin.readline()
raise SystemExit("it went on")
"""
NODE = ["stele.cli", "node", "run", "--data-dir", "d", "--node-id", "a" * 32, "--cluster-id", "b" * 32]
NODE += ["--masters", "127.0.0.1:1"]
LIST = ["stele.cli", "table", "list", "--masters", "127.0.0.1:1"]


def alone_works() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not alone_works(), reason="needs process namespaces (unshare)")
@pytest.mark.parametrize(
    ("heavy", "words"),
    [("grpc", NODE), ("grpc", LIST), ("kopf", ["stele_operator", "run"])],
    ids=["a node", "a command", "the operator"],
)
def test_it_ends_when_told_while_it_imports(heavy: str, words: list[str], tmp_path: Path) -> None:
    """A pod that was deleted in its first seconds stayed for the whole grace period of 30 s."""
    (tmp_path / f"{heavy}.py").write_text(IMPORTED)  # an import that takes its time
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = subprocess.Popen(
        [*ALONE, sys.executable, "-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    )
    with started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "imports\n"
            (first,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            started.communicate("go on\n")
            assert started.returncode == 128 + signal.SIGTERM
        finally:
            started.kill()

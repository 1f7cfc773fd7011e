"""README's quick start, run as it stands but for the installation: a cluster on this machine, first rows, a machine lost, a heal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the path"),
]
WATCH = "kubectl get events --watch"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a reader in a checkout, whose cluster is gone afterwards, whatever happened."""
    for name in ("crds", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = Path(sys.executable).parent
    there = {
        **os.environ,
        "STELE_LOCAL_DIR": str(tmp_path / "local"),
        "KUBECONFIG": str(tmp_path / "local" / "kubeconfig"),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    yield there
    subprocess.run(["stele-local", "down"], env=there, check=True, capture_output=True)


def run(script: str, folder: Path, env: dict[str, str]) -> str:
    """What a shell prints that ends at the first command that fails."""
    with open(folder / "printed", "w+") as printed:
        done = subprocess.run(["bash", "-ec", script], cwd=folder, env=env, stdout=printed, stderr=printed)
        printed.seek(0)
        told = printed.read()
    assert done.returncode == 0, told
    return told


def commands(code: str) -> str:
    """Without the installation, and without what ends only by Ctrl-C."""
    return "".join(
        f"{line}\n"
        for line in code.splitlines()
        if "pip install" not in line and not line.startswith(("python3 -m venv", WATCH))
    )


def test_the_quick_start(tmp_path: Path, place: dict[str, str]) -> None:
    start, use = blocks("README.md", language="sh")
    (program,) = blocks("README.md")
    assert "pip install" in start.code and WATCH in use.code
    (tmp_path / "first.py").write_text(program.code)
    run(commands(start.code), tmp_path, place)
    assert "Ada" in run(commands(use.code), tmp_path, place)
    with subprocess.Popen(WATCH.split(), env=place, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        healed = any("HealEnded" in line for line in watch.stdout)
        watch.kill()
    assert healed
    copied = """
        stele-local down; cp -a "$STELE_LOCAL_DIR" copy; stele-local up
        export STELE_LOCAL_DIR=$PWD/copy; eval "$(stele-local up)"
        trap "stele-local down" EXIT
        until stele-local exec stele --masters flights-masters:7051 ksck; do sleep 1; done
        stele-local exec python first.py
        kubectl get configmap flights-identity -o jsonpath="fork{.data.forkID}."
    """
    told = run(copied, tmp_path, place)
    assert "Ada" in told and "fork." not in told, "the copy serves the rows under a fork id of its own"
    assert "Ada" in run("stele-local exec python first.py", tmp_path, place), "the original goes on"

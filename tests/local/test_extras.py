"""A plain `pip install` has no extras: what needs one says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _without(module: str, program: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` as where `module` is not installed."""
    words = [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None; {program}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("name", "lacks", "install"),
    [("stele_local", "celpy", "./tools/stele_local"), ("stele_operator", "kopf", "'.[operator]'")],
)
def test_a_program_whose_extra_is_not_installed_says_so_in_one_line(
    name: str, lacks: str, install: str
) -> None:
    done = _without(lacks, f"from {name}.__main__ import main")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"{name.replace('_', '-')}: ") and f"`pip install {install}`" in line


def test_a_spark_session_without_spark_says_so() -> None:
    done = _without("pyspark", "from stele_spark.session import session; session()")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and "pip install '.[spark]'" in last


def test_a_module_of_ours_that_is_missing_is_no_matter_of_extras() -> None:
    done = _without("stele_local.cluster", "from stele_local.__main__ import main; main(['run'])")
    assert "Traceback" in done.stderr and done.returncode == 1


def test_only_the_command_that_runs_a_cluster_waits_for_its_imports(tmp_path: Path) -> None:
    done = _without(
        "stele_local.cluster",
        f"from stele_local.__main__ import main; main(['--folder', {str(tmp_path)!r}, 'down'])",
    )
    assert (done.returncode, done.stdout) == (0, f"no cluster runs in {tmp_path}\n"), done.stderr

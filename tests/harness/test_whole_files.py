"""A run of many files ends, and with every other test run, when a worker dies in the middle or at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST

DIES = "import os\ndef test_dies():\n    open({mark!r}, 'a').write('x')\n    os._exit(3)\n"
LIVES = "def test_lives():\n    pass\n"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("place", "after"), [(3, 1), (7, 0), (7, 4)], ids=["middle", "last", "last with more"]
)
def test_a_worker_dies_and_all_others_run(tmp_path: Path, place: int, after: int) -> None:
    mark = tmp_path / "died"
    for n in range(8):
        tests = DIES.format(mark=str(mark)) if n == place else LIVES
        more = "".join(LIVES.replace("lives", f"lives_{i}") for i in range(after))
        (tmp_path / f"test_{n}.py").write_text(tests + more)
    options = (
        "-q -n 2 --dist loadfile --no-loadscope-reorder -p tests.harness.whole_files -p no:cacheprovider"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"1 failed, {7 + 8 * after} passed" in run.stdout
    assert mark.read_text() == "x", "it was run once"


def test_what_takes_longest_is_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []

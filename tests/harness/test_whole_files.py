"""A run of many files ends, and with every other test run, when a worker dies in the middle or at the end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.harness.whole_files import TOGETHER, folders_from

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
    run = _run(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"1 failed, {7 + 8 * after} passed" in run.stdout
    assert mark.read_text() == "x", "it was run once"


def test_what_takes_longest_and_what_goes_together_is_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []
    assert [name for name in TOGETHER if not (ROOT / name).exists()] == []


def test_one_worker_runs_the_files_that_go_together(tmp_path: Path) -> None:
    names = [*TOGETHER, *(f"tests/test_{n}.py" for n in range(4))]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        said = (
            f"import os, time\ndef test_it():\n    open({str(path) + '.by'!r}, 'w').write(str(os.getpid()))\n"
        )
        path.write_text(f"{said}    time.sleep(0.1)\n")
    done = _run(tmp_path)
    assert f"{len(names)} passed" in done.stdout, done.stdout + done.stderr
    ran = {name: (tmp_path / f"{name}.by").read_text() for name in names}
    for together in set(TOGETHER.values()):
        assert len({ran[name] for name in TOGETHER if TOGETHER[name] == together}) == 1
    assert len(set(ran.values())) == 2


def test_all_sessions_of_spark_in_a_tests_own_process_are_in_few_javas() -> None:
    """Files whose tests have a session by a fixture, or make one."""
    makes = re.compile(
        r"\b(?:spark|read|engine): (?:Any|Callable)|^ +\w+ = session\(|\bspark_python\(\)", re.MULTILINE
    )
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name in ("spark", "docs")]
    found = {str(path.relative_to(ROOT)) for path in files if makes.search(path.read_text())}
    assert found == set(TOGETHER)


def test_workers_collect_from_different_folders_and_name_the_same_tests(tmp_path: Path) -> None:
    """Each test is named after its place, and each import leaves a line for its worker."""
    for folder in "abcd":
        for n in range(2):
            path = tmp_path / folder / f"test_{folder}{n}.py"
            path.parent.mkdir(exist_ok=True)
            told = f"open({str(tmp_path / 'by')!r} + str(os.getpid()), 'a').write('{folder}{n} ')"
            path.write_text(f"import os\n{told}\n{LIVES}")
    done = _run(tmp_path)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr
    orders = sorted(path.read_text().split() for path in tmp_path.glob("by*"))
    assert orders == [
        ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"],
        ["c0", "c1", "d0", "d1", "a0", "a1", "b0", "b1"],
    ]


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75])
def test_a_share_begins_elsewhere_and_leaves_nothing_out(share: float) -> None:
    tests = ROOT / "tests"
    first, *_ = found = folders_from(tests, share)
    assert sorted(found) == folders_from(tests, 0), "all, once each"
    begun = [path for path in tests.rglob("test_*.py") if path.relative_to(tests).parts[0] < first.name]
    assert abs(len(begun) / len(list(tests.rglob("test_*.py"))) - share) < 0.25


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    options = (
        "-q -n 2 --dist loadfile --no-loadscope-reorder -p tests.harness.whole_files -p no:cacheprovider "
        "--import-mode=importlib"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

"""How pytest-xdist deals test files out to its workers here: as `--dist loadfile` does, and to the end also when a worker dies.

xdist 3.8 puts all files of a dead worker back into its queue, also those whose tests have all run. A worker that gets such a
file has nothing to report, so it is asked for nothing more, and the run never ends. It also runs the test that killed the
worker again.

Each worker collects all tests. Where bytecode is still missing it rewrites the assertions of each file, which takes most of the
time. So each begins with another share of the folders, and finds later what the others have written.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_SPARK = {
    "Spark": (
        "tests/spark/test_spark.py",
        "tests/spark/test_following.py",
        "tests/spark/test_retries.py",
        "tests/docs/test_spark.py",
        "tests/docs/test_spark_flights.py",
        "tests/spark/test_near.py",
        "tests/spark/test_lost_nodes.py",
    ),
    "Spark's catalog, and executors": (
        "tests/spark/test_jvm.py",
        "tests/spark/test_backup_jobs.py",
        "tests/spark/test_columns.py",
        "tests/spark/test_jvm_changes.py",
        "tests/spark/test_jvm_creating.py",
        "tests/spark/test_own_host.py",
        "tests/spark/test_parts.py",
        "tests/spark/test_speculation.py",
    ),
}
TOGETHER = {file: name for name, files in _SPARK.items() for file in files}
"""Files that one worker runs, by the name of what they share. All sessions of a process share one Java, which takes seconds to
start, and many more until it is fast. Two of them do not keep the run waiting at its end."""


class WholeFiles(LoadFileScheduling):
    """Files to workers, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        """What a worker runs as a whole: a file, or several."""
        file: str = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Let others run what a worker left. Returns the test that it died in, which has failed and is not run again."""
        left = {
            file: tests for file, tests in self.assigned_work.pop(node).items() if not all(tests.values())
        }
        if not left:
            return None
        tests = next(iter(left.values()))
        died_in = next(test for test, ended in tests.items() if not ended)
        tests[died_in] = True
        self.workqueue.update((file, tests) for file, tests in left.items() if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return str(died_in)

    def _reschedule(self, node: WorkerController) -> None:
        """Keep a worker busy: it begins a test only when it has the next one too, or knows that there is none."""
        if node not in self.registered_collections:
            return  # it begins, and is asked when it knows the tests
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            if not self.workqueue:
                node.shutdown()
                return
            self._assign_work_unit(node)


def folders_from(root: Path, share: float) -> list[Path]:
    """What lies in `root`, in order and round: it begins where this share of the test files lies behind."""
    there = sorted(path for path in root.iterdir() if path.is_dir() or path.match("test_*.py"))
    files = [sum(1 for _ in path.rglob("test_*.py")) if path.is_dir() else 1 for path in there]
    behind = accumulate(files, initial=0)
    first = sum(1 for _, n in zip(there, behind, strict=False) if n < share * sum(files))
    return there[first:] + there[:first]


def pytest_configure(config: pytest.Config) -> None:
    """A worker that is to collect one folder begins with its share of it."""
    worker: dict[str, str | int] | None = getattr(config, "workerinput", None)
    if worker is None or len(config.args) != 1 or not (root := Path(config.args[0])).is_dir():
        return
    number = int(str(worker["workerid"]).removeprefix("gw"))
    share = number / int(worker["workercount"])
    config.args[:] = [str(path) for path in folders_from(root, share)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All workers name the same tests in the same order: xdist compares."""
    items.sort(key=lambda item: item.path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles | None:
    """A hook of xdist: for `--dist loadfile` only."""
    return WholeFiles(config, log) if config.getvalue("dist") == "loadfile" else None

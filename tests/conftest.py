"""What holds for all tests: examples of hypothesis take as long as they take, on machines of any speed, and a run that
is told to end (SIGTERM, as `timeout` and CI send it) stops what it started, as one that is interrupted does. What takes
long begins first, so that no worker is left alone with it at the end. A worker that dies fails its test and no more, and
the report has the stacks of its threads. A command
that runs in the process of its test sets how Stele logs for that test only."""

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.harness import whole_files
from tests.spark import archive

settings.register_profile("stele", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stele")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Spark starts Java by a fork that closes all files before it becomes Java, and gRPC's threads, which its fork handlers start
# again in the child, abort it there. Nothing here forks and goes on.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
for name, value in archive.options(archive.FILE).items():
    os.environ.setdefault(name, value)

signal.signal(signal.SIGTERM, _interrupt)

LONGEST = (
    "operator/test_whole.py",
    "spark/test_spark.py",
    "spark/test_jvm.py",
    "badinput/test_older_copy.py",
    "mutants/test_mutants.py",
    "operator/test_roll_whole.py",
    "operator/test_nodes_whole.py",
    "driver/test_recover_on_processes.py",
    "docs/test_spark.py",
    "chaos/test_chaos.py",
    "upgrade/test_roll.py",
    "operator/test_masters_whole.py",
    "operator/test_counting.py",
    "docs/test_quick_start.py",
    "operator/test_operator.py",
    "sim/test_sim.py",
    "operator/test_plan_whole.py",
    "tserver/test_merges.py",
    "tserver/test_flushes.py",
    "chaos",
    "power",
    "mutants",
    "docs",
    "badinput",
    "spark",
    "operator",
    "master",
    "upgrade",
    "tserver",
    "linear",
    "client",
    "driver",
)
"""What takes longest, first: files of more than a minute, then folders. A file that begins last keeps one worker busy at the
end, and the others idle."""


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Some commands log warnings only: later tests of the same process that wait for a line would wait in vain."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.hookimpl(trylast=True)  # pytest's own goes to an output that is nobody's to read
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(whole_files)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        stacks = _stacks(worker).open("w")  # open until the process ends, in which case it may be written
        faulthandler.enable(stacks)
        config.stash[_STACKS] = stacks


def pytest_unconfigure(config: pytest.Config) -> None:
    stacks = config.stash.get(_STACKS, None)
    if stacks is not None:
        faulthandler.disable()
        stacks.close()
        Path(stacks.name).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: object) -> None:
    path = _stacks(report.node.workerinput)
    with contextlib.suppress(FileNotFoundError):
        report.sections.append(("stacks of the worker that died", path.read_text() or "none: it was killed"))
        path.unlink()


_STACKS = pytest.StashKey[Any]()


def _stacks(worker: dict[str, Any]) -> Path:
    """Where a worker of this run writes its threads' stacks if it dies of a signal."""
    return Path(tempfile.gettempdir()) / f"stele-tests-{worker['testrunuid']}-{worker['workerid']}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is made meanwhile stays, so to look for garbage is in vain: it took a fifth of the time, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of LONGEST; beyond that as they were."""
    rank = {name: n for n, name in enumerate(LONGEST)}
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(here) if here in item.path.parents else item.path
        return rank.get(str(name), rank.get(str(name.parent), len(rank)))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """All modules and tests that there are stay until the end, so the garbage collector need not look at them again: that
    took a twentieth of the time of all tests in one process."""
    gc.collect()
    gc.freeze()

"""The release that all end-to-end tests share, and what each waited for."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from examples.demo.kube_place import KubePlace
from tests.e2e.bench import NAMESPACE, Bench

HERE = Path(__file__).parent
WAITS = pytest.StashKey[list[str]]()
FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without `make e2e` nothing here runs; with it, each test has time for what real clusters take."""
    wanted = bool(os.environ.get("STELE_E2E"))
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kube)
            item.add_marker(pytest.mark.timeout(1800))
            # The Kubernetes client leaves the socket of an exec to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            if not wanted:
                item.add_marker(pytest.mark.skip(reason="needs a real Kubernetes: make e2e"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test failed, for its fixtures."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubePlace]:
    """The namespace, the images, the release; gone afterwards, with every machine on."""
    folder = Path(os.environ.get("STELE_E2E_FOLDER") or tmp_path_factory.mktemp("e2e"))
    with KubePlace(folder, keep=False, namespace=NAMESPACE) as made:
        made.set_up(made.kube, print)
        yield made


@pytest.fixture(scope="session")
def _waits(request: pytest.FixtureRequest) -> list[str]:
    return request.config.stash.setdefault(WAITS, [])


@pytest.fixture
def bench(place: KubePlace, _waits: list[str], request: pytest.FixtureRequest) -> Iterator[Bench]:
    """What a test asks; whatever it switched off is on again afterwards. If it failed, the pods' logs are kept."""
    _waits.append(f"\n{request.node.name}")

    def note(line: str) -> None:
        _waits.append(line)
        print(line, flush=True)

    made = Bench(place, note)
    yield made
    made.kill_streams()
    place.power.restore()
    made.machines_ready()
    if request.node.stash.get(FAILED, False):
        place.save_logs(place.folder / request.node.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was waited for, and how long it took."""
    waits = config.stash.get(WAITS, [])
    if waits:
        terminalreporter.section("waited for")
        for line in waits:
            terminalreporter.write_line(line)

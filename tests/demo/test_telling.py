"""Lines have the time at which a thing was seen, whatever was waited for; what is left is named, and goes with one line."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.__main__ import what_lies_in
from examples.demo.kube import EventLine
from examples.demo.narrator import Narrator
from examples.demo.outside import watched
from examples.demo.places import LocalPlace
from examples.demo.tools import _stage
from stele.driver.progress import Progress
from stele_operator.plan.status import healing_status


class Told:
    """The part of Kubernetes that the narrator looks at."""

    def __init__(self) -> None:
        self.lines: list[EventLine] = []
        self.state: dict[str, Any] = {}

    def events(self) -> list[EventLine]:
        return self.lines

    def status(self, kind: str, name: str) -> dict[str, Any]:
        return self.state

    def happen(self, reason: str) -> None:
        key = (reason, 1)
        self.lines.append(EventLine(key, "TabletCluster", "flights", reason, "words [in brackets]", False))


def test_a_line_has_the_time_at_which_it_was_seen() -> None:
    out, told = io.StringIO(), Told()
    narrator = Narrator(told, "flights", Console(file=out, width=200))  # type: ignore[arg-type]
    told.happen("Early")
    narrator.look()
    assert not out.getvalue()
    time.sleep(0.4)
    told.happen("Late")
    narrator.catch_up()
    narrator.catch_up()
    early, late = out.getvalue().splitlines()
    assert early.endswith(" s  event   TabletCluster/flights Early: words [in brackets]")
    assert late.endswith(" s  event   TabletCluster/flights Late: words [in brackets]")
    assert float(late.split()[0]) - float(early.split()[0]) >= 0.3


def test_a_step_of_no_tablet_is_told_too() -> None:
    """The driver waits for the masters, or for a node; the demo ended with a KeyError."""
    out, told = io.StringIO(), Told()
    waits = Progress("", "", "Waiting", "Blocked", "the leading master has not heard from all nodes yet", "")
    copies = Progress("t1", "flights", "Copying", "WaitCopy", "it is new", "")
    told.state = {"healing": healing_status([waits, copies])}
    Narrator(told, "flights", Console(file=out, width=200)).catch_up()  # type: ignore[arg-type]
    first, second = out.getvalue().splitlines()
    assert first.endswith("cluster: Waiting (the leading master has not heard from all nodes yet)")
    assert second.endswith("tablet t1: Copying (it is new)")


def test_what_is_waited_for_is_watched_and_does_not_outlive_a_failure(tmp_path: Path) -> None:
    seen: list[float] = []
    done = watched(
        [sys.executable, "-c", "import time; time.sleep(1); print('done')"],
        100,
        lambda: seen.append(0),
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert seen

    begun = tmp_path / "begun"
    begin = ["sh", "-c", f"echo $$ > {begun}; exec sleep 600"]

    def fail() -> None:
        if begun.exists() and begun.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(begin, 300, fail)
    assert not Path(f"/proc/{int(begun.read_text())}").exists()
    with pytest.raises(subprocess.TimeoutExpired):
        watched(begin, 0.1, lambda: None)
    assert not Path(f"/proc/{int(begun.read_text())}").exists()


def test_a_stage_is_told_as_it_begins_and_while_it_lasts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.demo.tools._STAGE_TOLD_EVERY_S", 0.05)
    with _stage("starting Spark"):
        told = ""
        while told.count("\n") < 2:  # the test's own time-out ends it otherwise
            time.sleep(0.01)
            told += capsys.readouterr().err
    first, second, *_ = told.splitlines()
    assert first == "spark: starting Spark"
    assert re.fullmatch(r"spark: starting Spark \(\d+ s so far\)", second)


def test_what_lies_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert what_lies_in(folder) == "It left nothing."
    folder.mkdir()
    (folder / "volume").write_bytes(b"x" * 3_000_000)
    assert what_lies_in(folder) == f"Logs and volumes (3 MB) lie in {folder}; `rm -r {folder}` removes them."


def test_the_demo_takes_no_folder_that_holds_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()  # a stopped one
    with pytest.raises(RuntimeError, match="down --wipe"), LocalPlace(tmp_path, keep=False):
        pass


@pytest.mark.parametrize("theirs", [False, True])
def test_the_line_that_stops_a_demo_removes_its_data_but_nobody_elses(tmp_path: Path, theirs: bool) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    if theirs:
        (folder / "thesis.tex").touch()
    place = LocalPlace(folder, keep=True)
    try:
        with place:
            place.set_up(place.kube, lambda line: None)
        assert place.operator_alive()
        *lines, line = place.lines_to_try().strip().splitlines()
        by_name = f"stele-local --folder {folder} exec stele --masters flights-masters:7051 ksck"
        assert any(by_name in each for each in lines), "no line that outlives the masters' addresses"
        subprocess.run(line, shell=True, check=True, capture_output=True)
        assert place._operator is not None
        place._operator.wait(60)
        assert folder.exists() is theirs
    finally:
        place.stop_operator()
        place._local("down", check=False)

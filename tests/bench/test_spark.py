"""`python -m bench.spark`: that it runs and takes every measure. No time is judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.spark import measures
from bench.spark.__main__ import main
from bench.spark.processor import Processor
from bench.spark.turns import Median, Run, System, Turns
from stele_spark.session import JAR

ROOT = Path(__file__).parents[2]
ROWS = 10_000
BURN = "import time\nwhile time.process_time() < 0.5:\n    pass"


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_every_measure_is_taken_and_nothing_is_left(tmp_path: Path) -> None:
    words = ["--rows", str(ROWS), "--rounds", "1", "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.spark", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"repeat: python -m bench.spark {' '.join(words)}" in done.stdout
    cells = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    results = {line[0].strip(): line[3].strip() for line in cells[1:] if not line[0].startswith(" ---")}
    assert set(results) == {measure.name for measure in measures.announced().measures.values()}
    for name, result in results.items():
        if name.endswith("jvm reader") and not JAR.exists():
            assert result == "not measured" and "make jar" in done.stdout
        else:
            assert ("M rows/s" if name != "difference scan of 1 %, against a full scan" else "x:") in result
    assert list(tmp_path.iterdir()) == []


def test_processor_time_of_a_process_that_has_ended_counts_from_the_first_look_on() -> None:
    processor = Processor(lambda: ())
    with subprocess.Popen([sys.executable, "-c", f"{BURN}\ninput()"], stdin=subprocess.PIPE) as child:
        begun = processor.look()
        while (before := processor.look()).since(begun).all_s < 0.45:
            assert child.poll() is None
        child.communicate(b"\n")
        assert processor.look().since(begun).all_s >= 0.45
        assert processor.look().since(before).all_s < 0.45, "it had used the most of it before"


def test_processor_time_of_the_cluster_is_told_apart() -> None:
    with subprocess.Popen([sys.executable, "-c", f"{BURN}\ninput()"], stdin=subprocess.PIPE) as member:
        processor = Processor(lambda: [member.pid])
        begun = processor.look()
        while (spent := processor.look().since(begun)).cluster_s < 0.45:
            assert member.poll() is None
        assert spent.all_s >= spent.cluster_s
        member.communicate(b"\n")
        assert processor.look().since(begun).cluster_s == 0


def test_systems_take_turns_and_the_median_counts() -> None:
    took: list[str] = []

    def system(name: str) -> System:
        return System(name, lambda: took.append(name), None, before=lambda: took.append(f"before {name}"))

    turns = Turns(Processor(lambda: ()), 2, lambda text: None)
    found = turns.take("m", [system("a"), system("b")])
    once = ["before a", "a", "before b", "b"]
    assert took == [*once, *once, "before b", "b", "before a", "a"], "the first ones do not count"
    assert set(found) == {"a", "b"}
    runs = [Run(1.0, 5.0, 1.0), Run(3.0, 1.0, 1.0), Run(2.0, 3.0, 1.0)]
    assert Median.of(runs) == Median(2.0, 3.0, 1.0)
    assert Median.of(runs).told(4_000_000) == "2M rows/s; 0.75 (0.25) us"


def test_a_wrong_result_ends_the_bench() -> None:
    turns = Turns(Processor(lambda: ()), 1, lambda text: None)
    with pytest.raises(RuntimeError, match="count, python: got 3; expected 4"):
        turns.take("count", [System("python", lambda: 3, 4)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "count,foo"], "no measure is called foo; choose from count, "),
        (["--rows", "5"], "expected 1,000 or more"),
        (["--rounds", "0"], "expected 1 or more"),
        (["--directory", "/dev/null/nowhere"], "--directory /dev/null/nowhere: "),
    ],
)
def test_a_wrong_argument_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert said in capsys.readouterr().err

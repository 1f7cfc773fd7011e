"""The list fits the code; the tool tells seen, survived, hung and broken faults apart; a share of the list is planted in every run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.mutants.__main__ import main, row, run
from tests.mutants.faults import Fault, outdated, read_faults, share
from tests.mutants.plant import Tree

PER_RUN = 12
"""Faults in each run of all tests: a minute or so on two cores."""
DAY_S = 86_400


def test_every_old_line_stands_once_and_every_test_is_there() -> None:
    assert outdated(read_faults()) == []


def test_a_share_is_planted_and_none_survives() -> None:
    """Another one each day; STELE_MUTANTS names one by its number."""
    listed = [
        fault for fault in read_faults() if not fault.is_java
    ]  # Maven and a Spark for each take too long here
    of = -(-len(listed) // PER_RUN)
    number = int(os.environ.get("STELE_MUTANTS", time.time() // DAY_S)) % of
    # What these tests say without a fault, the rest of the run tells.
    survivors = [v for v in run(share(listed, number, of), jobs=2) if v.survived]
    assert not survivors, f"share {number}/{of}:\n" + "\n".join(f"{row(v)}\n{v.broken}" for v in survivors)


def test_shares_leave_nothing_out() -> None:
    listed = [replace(FAULT, number=n) for n in range(1, 30)]
    parts = [share(listed, number, 7) for number in range(7)]
    assert sorted(f.number for part in parts for f in part) == [f.number for f in listed]
    assert {len(part) for part in parts} == {4, 5}


FAULT = Fault(
    1, "made", "one is one", "node/made.py", "ONE = 1", "ONE = 2", ("tests/test_made.py::test_one",)
)
VERDICTS = {
    "ONE = 2": "tests/test_made.py::test_one",
    "ONE = 1 ": "",
    "ONE = (": "pytest ended with ",
    "while True: pass": "(hung for 5 s)",
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree of one line and one test."""
    for name, text in (
        ("node/made.py", "ONE = 1\n"),
        ("operator/none.py", ""),
        ("pipeline/none.py", ""),
        ("tests/test_made.py", "from made import ONE\n\n\ndef test_one():\n    assert ONE == 1\n"),
    ):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_seen_survived_broken_and_hung_faults_are_told_apart(small: Path, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "copy", small)
    for new, told in VERDICTS.items():
        verdict = tree.judge(replace(FAULT, new=new), 5.0 if "while" in new else 60.0)
        assert verdict.survived is (new in ("ONE = 1 ", "ONE = ("))
        assert (verdict.broken if verdict.broken else verdict.saw).startswith(told), verdict
        assert bool(verdict.broken) is ("(" in new)
    assert (tree.directory / "node/made.py").read_text() == "ONE = 1\n", "it was taken out again"
    assert (small / "node/made.py").read_text() == "ONE = 1\n"
    assert tree.run(FAULT.tests, 60.0)[0] == 0


def test_what_does_not_fit_the_code_is_told(small: Path) -> None:
    (small / "node/made.py").write_text("ONE = 1\nONE = 1\n")
    wrong = [
        FAULT,
        replace(FAULT, old="TWO = 2"),
        replace(FAULT, file="node/gone.py"),
        replace(FAULT, tests=("tests/test_made.py::test_two",)),
    ]
    (small / "node/two.py").write_text("ONE = 1\n")
    (told,) = outdated([replace(FAULT, file="node/two.py", new="ONE = (")], small)
    assert "is no Python once planted: '(' was never closed" in told
    told = outdated(wrong, small)
    assert [line.split(": ", 2)[-1][:15] for line in told] == [
        "stands 2 times ",
        "stands 0 times ",
        "stands 0 times ",
        "stands 2 times ",
        "no such test: t",
    ]


def test_the_command_says_what_it_was_not_able_to_do(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = small / "faults"
    lists.mkdir()
    text = "[[fault]]\n" + "".join(
        f"{k} = {getattr(FAULT, k)!r}\n" for k in ("promise", "file", "old", "new")
    )
    (lists / "made.toml").write_text(text + "tests = ['tests/test_made.py']\n")
    for module in ("faults", "plant", "__main__"):
        monkeypatch.setattr(f"tests.mutants.{module}.ROOT", small)
    monkeypatch.setattr("tests.mutants.__main__.read_faults", lambda: read_faults(lists))
    monkeypatch.setattr("tests.mutants.__main__.outdated", lambda listed: outdated(listed, small))

    monkeypatch.setattr("tests.mutants.__main__.Tree", lambda directory: Tree(directory, small))

    def command(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(main, arguments)
        return ended.exit_code, ended.output

    for wrong, why in ((("--only", "2"), "the list has 1 to 1"), (("--share", "3"), "expected K/N")):
        code, output = command(*wrong)
        assert code == 2 and why in output
    code, output = command("--list")
    assert code == 0 and "one is one" in output
    code, output = command()
    assert code == 0 and "1 faults, 0 survived" in output, output
    (small / "node/made.java").write_text("ONE = 1\n")
    in_java = lists / "made_java.toml"
    in_java.write_text((lists / "made.toml").read_text().replace("made.py", "made.java", 1))
    code, output = command("--only", "2")
    assert code == 1 and "fault 2 is in Java, and the JVM reader is not built: make jar" in output
    code, output = command("--only", "1")
    assert code == 0 and "left out" not in output and "1 faults, 0 survived" in output
    code, output = command("--share", "0/1")
    assert code == 0 and "1 faults in Java are left out" in output
    in_java.unlink()
    test = small / "tests/test_made.py"
    test.write_text(test.read_text() + "    assert False\n")
    code, output = command()
    assert code == 1 and "test_one fails without the fault, too" in output and "1 survived" in output
    (small / "node/made.py").write_text("ONE = 3\n")
    code, output = command("--list")
    assert code == 1 and "stands 0 times in node/made.py" in output

"""The kept list of faults: one TOML file for each package under `faults/`.

Invariant: each `old` stands exactly once in its file, so the list follows the code or the tests fail.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent / "faults"
_KEYS = {"promise", "file", "old", "new", "tests"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: in `file`, relative to the root, `old` becomes `new`, which breaks `promise`."""

    number: int
    package: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids, those that see it soonest first."""

    @property
    def is_java(self) -> bool:
        """Whether the JVM reader must be built with it, which takes longer than most tests."""
        return self.file.endswith(".java")


def read_faults(lists: Path = LISTS) -> list[Fault]:
    """All faults, numbered from 1 in the order of the files' names.

    Raises:
        ValueError: an entry lacks a key or has an unknown one.
    """
    found: list[Fault] = []
    for path in sorted(lists.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            if set(entry) != _KEYS or not entry["tests"]:
                raise ValueError(
                    f"{path.name}: an entry has {sorted(entry)}, expected {sorted(_KEYS)}: {entry}"
                )
            found.append(
                Fault(
                    len(found) + 1,
                    path.stem,
                    entry["promise"],
                    entry["file"],
                    entry["old"],
                    entry["new"],
                    tuple(entry["tests"]),
                )
            )
    return found


def outdated(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """What is wrong with the list: old lines that do not stand exactly once, changes of nothing or to what is
    no program, tests that are not there."""
    told = []
    for fault in faults:
        where = f"{fault.number} ({fault.package}: {fault.promise})"
        path = root / fault.file
        count = path.read_text().count(fault.old) if path.is_file() else 0
        if count != 1:
            told.append(f"{where}: stands {count} times in {fault.file}, expected once: {fault.old!r}")
        elif path.suffix == ".py":
            told += [f"{where}: is no Python once planted: {exc}" for exc in _syntax_error(path, fault)]
        if fault.old == fault.new:
            told.append(f"{where}: old and new are the same")
        for test in fault.tests:
            told += [f"{where}: no such test: {test}"] if not _is_there(test, root) else []
    return told


def _syntax_error(path: Path, fault: Fault) -> list[SyntaxError]:
    try:
        ast.parse(path.read_text().replace(fault.old, fault.new))
    except SyntaxError as exc:
        return [exc]
    return []


def _is_there(test: str, root: Path) -> bool:
    name, *inside = test.split("::")
    path = root / name
    if not path.is_file():
        return False
    text = path.read_text()
    return all(f"def {part.split('[')[0]}(" in text or f"class {part}" in text for part in inside)


def share(faults: list[Fault], number: int, of: int) -> list[Fault]:
    """Share `number` of `of` shares, counted from 0: each fault is in one share, each share goes through all packages."""
    return [fault for fault in faults if fault.number % of == number % of]

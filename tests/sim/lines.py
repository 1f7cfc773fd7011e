"""Records which lines of production's functions run, for `python -m tests.sim --coverage`.

Counts only lines inside functions, since modules were imported before. Slows Python down several times.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import stele

ROOT = Path(stele.__file__).parent


def _functions(code: CodeType) -> Iterator[CodeType]:
    if code.co_flags & inspect.CO_OPTIMIZED:
        yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _functions(constant)


def function_lines(path: Path) -> set[int]:
    """The lines of a file that run when its functions are called."""
    lines: set[int] = set()
    for code in _functions(compile(path.read_text(), str(path), "exec")):
        lines |= {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
    return lines


class LinesRun:
    """Counts while its context is entered. `packages`: names below `stele`."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages
        self._all = {
            str(path): function_lines(path)
            for package in packages
            for path in sorted((ROOT / package).glob("*.py"))
        }
        self._ran: dict[str, set[int]] = {path: set() for path in self._all}

    def __enter__(self) -> LinesRun:
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        ran = self._ran.get(frame.f_code.co_filename)
        if ran is None:
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            ran.add(frame.f_lineno)
            return line

        return line

    def shares(self) -> dict[str, tuple[int, int]]:
        """For each package: (lines that ran, all lines)."""
        found = dict.fromkeys(self.packages, (0, 0))
        for path, lines in self._all.items():
            package = Path(path).parent.name
            ran, all_lines = found[package]
            found[package] = (ran + len(lines & self._ran[path]), all_lines + len(lines))
        return found

    def missing(self) -> Counter[str]:
        """By file below `stele`: how many lines did not run."""
        return Counter(
            {
                str(Path(path).relative_to(ROOT)): len(lines - self._ran[path])
                for path, lines in self._all.items()
            }
        )

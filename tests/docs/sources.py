"""What the code defines, and the functions that a page says are called, in their order. Used by the tests of pages about the code."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.docs.blocks import ROOT

NODE, OPERATOR, PIPELINE = ROOT / "node" / "stele", ROOT / "operator", ROOT / "pipeline"
LOCAL = ROOT / "tools" / "stele_local"
BASES = (NODE, NODE.parent, OPERATOR, PIPELINE, LOCAL, ROOT)
"""From where pages name files."""


@dataclass
class Defined:
    """What one file defines: `own` as __qualname__ says it; `members` and `bases` of each class, by name."""

    own: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)


@cache
def defined(path: Path) -> Defined:
    found = Defined()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                found.names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.names.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) if name.isidentifier():
                found.names.add(name)  # a field of a message; a word that users are shown
            case ast.ClassDef(name=name):
                found.names.add(name)
                found.bases[name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                found.members[name] = {
                    each.name if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) else str(each.attr)
                    for each in ast.walk(node)
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    or (isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
                } | {t.id for t in ast.walk(node) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.own.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found.own |= {f"{node.name}.{method.name}" for method in methods}
    return found


@cache
def sources() -> tuple[Path, ...]:
    found = (path for base in (NODE, OPERATOR, PIPELINE, LOCAL) for path in sorted(base.rglob("*.py")))
    return tuple(path for path in found if "_pb2" not in path.name)


def has_member(cls: str, member: str) -> bool:
    """Whether a class of this name, or one that it is derived from, has it."""
    for path in sources():
        found = defined(path)
        if cls in found.members and (
            member in found.members[cls] or any(has_member(base, member) for base in found.bases[cls])
        ):
            return True
    return False


def is_known(name: str) -> bool:
    return any(name in defined(path).names for path in sources())


Function = tuple[str, str]
"""(Path as pages name it, __qualname__)."""
Step = tuple[Function, ...]
"""One of them is called."""


def place(file: str) -> Path:
    """The file that pages name so."""
    return next(base / file for base in (NODE, OPERATOR) if (base / file).exists())


def steps(page: Path) -> dict[int, list[Step]]:
    """By row of a page: the functions in its second column, in order; those with "or" between them are one step."""
    found: dict[int, list[Step]] = {}
    for number, where in re.findall(r"^\| (\d+) \| (.*?) \|", page.read_text(), re.MULTILINE):
        file, joined, row = "", False, found.setdefault(int(number), [])
        for alternative, span in re.findall(r"( or )?`([^`]+)`", where):
            if span.endswith(".py"):
                file = span
                joined = bool(alternative)
                continue
            assert span in defined(place(file)).own, f"row {number}: {file} has no {span}"
            if joined or alternative:
                row[-1] = (*row[-1], (file, span))
            else:
                row.append(((file, span),))
            joined = False
    return found


def functions_of(cell: str) -> list[Function]:
    """The functions that a cell of a table names, each with the file before it."""
    found, file = list[Function](), ""
    for span in re.findall(r"`([^`]+)`", cell):
        if span.endswith(".py"):
            file = span
        else:
            found.append((file, span))
    return found


class Calls:
    """The calls of some functions, in order, in this thread and in those that are started while it is in use."""

    def __init__(self, wanted: set[Function]) -> None:
        self._wanted = wanted
        self._known: dict[CodeType, Function | None] = {}
        self._recording = False
        self.made: list[Function] = []

    def __enter__(self) -> Calls:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._recording = False
        sys.setprofile(None)
        threading.setprofile(None)

    def record(self) -> None:
        self._recording = True

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._recording or event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            path = Path(code.co_filename)
            base = next((base for base in (NODE, OPERATOR) if path.is_relative_to(base)), None)
            function = (str(path.relative_to(base)), code.co_qualname) if base is not None else None
            self._known[code] = function if function in self._wanted else None
        function = self._known[code]
        if function is not None:
            self.made.append(function)


def first_missing(made: Sequence[Function], chain: Sequence[tuple[int, Step]]) -> str:
    """The first step that is not found behind the one before, "" if all are."""
    at = 0
    for row, step in chain:
        places = [made.index(function, at) for function in step if function in made[at:]]
        if not places:
            return f"row {row}: {' or '.join(name for _, name in step)}"
        at = min(places) + 1
    return ""

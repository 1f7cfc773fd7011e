"""The pages that lead through the code name files, functions and modules that exist, and a put goes where docs/put.md says."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from stele.client import Client
from tests.docs.blocks import ROOT
from tests.tserver.local import SCHEMA, LocalCluster

NODE, OPERATOR, PIPELINE = ROOT / "node" / "stele", ROOT / "operator", ROOT / "pipeline"
BASES = (NODE, NODE.parent, OPERATOR, PIPELINE, ROOT)
"""From where pages name files."""
PUT = ROOT / "docs" / "put.md"
PARTS = (*(NODE / part for part in ("raft", "wal", "tablet", "consensus", "tserver", "master", "driver")),)
"""Folders of code with a README of their own."""
PAGES = (PUT, *(part / "README.md" for part in PARTS))
SPAN = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
DOTTED = re.compile(r"_?[A-Z]\w+\.\w+")
NAME = re.compile(r"_\w+|[A-Z][a-z]\w*[A-Z]\w*|[a-z]\w*_\w+|[A-Z]+_[A-Z_]+")
"""Names with an underscore or a hump; other words may be anything."""
THREAD = re.compile(r"stele-[\w-]+")
MODULE = re.compile(r"python -m ([\w.]+)")
KERNELS = {"IOCB_CMD_FDSYNC", "balance_dirty_pages", "io_submit", "vfs_fsync"}
"""Names that are not ours."""


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
    found = (path for base in (NODE, OPERATOR, PIPELINE) for path in sorted(base.rglob("*.py")))
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


def exists(path: str, page: Path) -> bool:
    """From the page's own folder, a package or the repository."""
    return any((base / path).exists() for base in (page.parent, *BASES))


def module_exists(name: str) -> bool:
    path = name.replace(".", "/")
    return any(
        (base / f"{path}{end}").exists() for base in BASES for end in (".py", "/__init__.py", "/__main__.py")
    )


def faults(page: Path) -> Iterator[str]:
    """What the page names and the code does not have."""
    text = FENCED.sub("", page.read_text())
    for target in LINK.findall(text):
        if "://" not in target and not (page.parent / target).exists():
            yield f"link to {target}"
    for span in SPAN.findall(text):
        if re.fullmatch(r"[\w/.]+\.(py|md|txt|toml)|[\w.]+/[\w/.]*", span):
            good = exists(span, page) or ("/" not in span and not span.endswith(".py"))
        elif DOTTED.fullmatch(span):
            good = has_member(*span.split("."))
        elif NAME.fullmatch(span):
            good = span in KERNELS or is_known(span)
        elif THREAD.fullmatch(span):
            good = any(f'"{span}"' in path.read_text() for path in sources())
        else:
            good = True
        if not good:
            yield f"`{span}`"
    for module in MODULE.findall(page.read_text()):
        if module != "pytest" and not module_exists(module):
            yield f"python -m {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert sorted(faults(page)) == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part.relative_to(ROOT)))
def test_a_readme_has_each_file_of_its_part(part: Path) -> None:
    text = (part / "README.md").read_text()
    files = [path.name for path in sorted(part.glob("*.py")) if path.name != "__init__.py"]
    assert [name for name in files if f"`{name}`" not in text] == []


def test_the_readme_leads_to_each_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [str(p.relative_to(ROOT)) for p in PAGES if f"({p.relative_to(ROOT)})" not in text] == []


# --- a put


Function = tuple[str, str]
"""(Path below node/stele, __qualname__)."""
Step = tuple[Function, ...]
"""One of them is called."""


def steps() -> dict[int, list[Step]]:
    """By row of docs/put.md: the functions in its second column, in order; those with "or" between them are one step."""
    found: dict[int, list[Step]] = {}
    for number, where in re.findall(r"^\| (\d+) \| (.*?) \|", PUT.read_text(), re.MULTILINE):
        file, joined, row = "", False, found.setdefault(int(number), [])
        for alternative, span in re.findall(r"( or )?`([^`]+)`", where):
            if span.endswith(".py"):
                file = span
                joined = bool(alternative)
                continue
            assert span in defined(NODE / file).own, f"row {number}: {file} has no {span}"
            if joined or alternative:
                row[-1] = (*row[-1], (file, span))
            else:
                row.append(((file, span),))
            joined = False
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
            function = (str(path.relative_to(NODE)), code.co_qualname) if path.is_relative_to(NODE) else None
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


async def test_a_put_goes_through_the_functions_that_its_page_names(tmp_path: Path) -> None:
    rows = steps()
    assert list(rows) == list(range(1, 29))
    with Calls({function for row in rows.values() for step in row for function in step}) as calls:

        def put(master: str) -> None:
            with Client([master], timeout_s=60) as client:
                table = client.create_table("t", SCHEMA)
                table.put({"id": 0, "name": "first"})
                calls.record()
                for number in range(3):  # a batch of the log may go with one that is under way
                    table.put({"id": number, "name": "row"})

        cluster = await LocalCluster(tmp_path).start()
        try:
            await asyncio.to_thread(put, cluster.master_address)
        finally:
            await cluster.close()
    # The leader's disk and the followers work at the same time; each is a chain of its own. An answer may come before the
    # leader's own sync has ended.
    for aside in (range(19, 24), range(17, 19)):
        chain = [(number, step) for number, row in rows.items() if number not in aside for step in row]
        assert first_missing(calls.made, chain) == ""

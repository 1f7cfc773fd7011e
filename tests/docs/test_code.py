"""The pages that lead through the code name files, functions and modules that exist, and a put goes where docs/put.md says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stele.client import Client
from tests.docs.blocks import ROOT
from tests.docs.sources import (
    BASES,
    LOCAL,
    NODE,
    OPERATOR,
    PIPELINE,
    Calls,
    first_missing,
    has_member,
    is_known,
    sources,
    steps,
)
from tests.tserver.local import SCHEMA, LocalCluster

PUT = ROOT / "docs" / "put.md"
PARTS = (
    *(
        NODE / p
        for p in (
            *("model", "raft", "wal", "tablet", "consensus", "tserver", "master", "driver", "client", "rpc"),
            *("backup", "cli"),
        )
    ),
    OPERATOR / "stele_operator",
    LOCAL / "stele_local",
    PIPELINE / "stele_spark",
)
"""Folders of code with a README of their own."""
HEAL = ROOT / "docs" / "heal-in-code.md"
PAGES = (
    PUT,
    HEAL,
    ROOT / "docs" / "design.md",
    ROOT / "docs" / "healing.md",
    *(part / "README.md" for part in PARTS),
)
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


def exists(path: str, page: Path) -> bool:
    """From the page's own folder, a package or the repository."""
    return any((base / path).exists() for base in (page.parent, *BASES))


def module_exists(name: str) -> bool:
    path = name.replace(".", "/")
    return any(
        (base / f"{path}{end}").exists() for base in BASES for end in (".py", "/__init__.py", "/__main__.py")
    )


def is_java(name: str) -> bool:
    """Whether the JVM reader has such a class."""
    return any((PIPELINE / "jvm" / "src").rglob(f"{name}.java"))


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
            good = span in KERNELS or is_known(span) or module_exists(span) or is_java(span)
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


async def test_a_put_goes_through_the_functions_that_its_page_names(tmp_path: Path) -> None:
    rows = steps(PUT)
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

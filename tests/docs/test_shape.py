"""Objects are composed: a class has one parent of ours at most, its state lies in one file, and nothing is a stub."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.blocks import ROOT
from tests.docs.sources import sources

VALUES = re.compile(r"(Rejected|Retryable|Corrupt|SteleError|ManyFaults)$")
"""Parents that other files may have: errors."""
DATA = {"Model", "TabletPartition"}
"""Likewise: the base of the resources' models, and a record that Spark pickles."""
LIBRARY = {"OnceLoader", "BoundedLoader"}
"""Likewise: PyYAML's loaders are extended by derived classes only."""


class Found(NamedTuple):
    """A class, where it stands, and its parents as the code names them."""

    name: str
    file: Path
    parents: tuple[str, ...]


@cache
def classes() -> tuple[Found, ...]:
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                parents = (re.split(r"[\[(]", ast.unparse(base))[0] for base in node.bases)
                found.append(Found(node.name, path, tuple(parents)))
    return tuple(found)


def ours(parent: str, file: Path) -> list[Found]:
    """The classes of ours that this name means in a file: it is defined or imported there."""
    text = file.read_text()
    if "." in parent or not re.search(
        rf"^(class {parent}\b|from stele.* import .*\b{parent}\b| +{parent},$)", text, re.M
    ):
        return []
    return [each for each in classes() if each.name == parent]


def is_protocol(found: Found) -> bool:
    return "Protocol" in found.parents


def test_a_class_has_one_parent_of_ours_at_most() -> None:
    many = [
        f"{each.file.relative_to(ROOT)}: {each.name}"
        for each in classes()
        if sum(any(not is_protocol(p) for p in ours(parent, each.file)) for parent in each.parents) > 1
    ]
    assert many == []


def test_no_objects_state_is_spread_over_files_by_inheritance() -> None:
    spread = [
        f"{each.file.relative_to(ROOT)}: {each.name} <- {parent}"
        for each in classes()
        for parent in each.parents
        if (found := ours(parent, each.file))
        and all(p.file != each.file and not is_protocol(p) for p in found)
        and not (VALUES.search(parent) or parent in DATA | LIBRARY)
    ]
    assert spread == []


def test_nothing_is_a_stub() -> None:
    stubs = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and node.exc
        and ast.unparse(node.exc).startswith("NotImplementedError")
    ]
    assert stubs == []

"""Ids in what people read have eight digits (docs/cli.md, Ids): refusals of every part, and the lines that commands print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "node" / "stele"
IDS = ("node_id", "tablet_id", "table_id", "cluster_id", "fork_id", "to_node", "from_node")
WHOLE = {
    "cli/cmeta.py",  # what a volume is: the first line
    "cli/ksck.py",  # the cluster: the first line
    "cli/tables.py",  # `describe`: the first line
    "cli/tablets.py",
    "tserver/formation.py",  # settings of a process and its volume, which are written with whole ids
    "tserver/offline.py",
    "tserver/options.py",
    "tserver/volume.py",
    "wal/recovery.py",
    "backup/chain.py",  # names of files in a backup
    "backup/jobs.py",
}
"""Files that show whole ids on purpose."""
FILES = sorted(str(path.relative_to(NODE)) for path in NODE.rglob("*.py") if "proto" not in path.parts)


def ends_in_id(value: ast.expr) -> bool:
    """Whether an expression is an id, whole."""
    if isinstance(value, ast.BoolOp):
        return any(ends_in_id(each) for each in value.values)
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return name.lstrip("_") in IDS


def said(tree: ast.Module) -> Iterator[ast.JoinedStr]:
    """The texts of refusals, and of lines for people."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("Rejected", "Retryable", "say", "UsageError", "show_done"):
            for text in (each for given in node.args for each in ast.walk(given)):
                if isinstance(text, ast.JoinedStr):
                    yield text


@pytest.mark.parametrize("name", [name for name in FILES if name not in WHOLE])
def test_ids_that_people_read_are_short(name: str) -> None:
    whole = [
        f"{name}:{text.lineno}: {ast.unparse(part.value)}"
        for text in said(ast.parse((NODE / name).read_text()))
        for part in text.values
        if isinstance(part, ast.FormattedValue) and ends_in_id(part.value)
    ]
    assert not whole, f"show eight digits, [:8], of {', '.join(whole)}"


def test_files_that_show_whole_ids_exist() -> None:
    assert set(FILES) >= WHOLE

"""The Python blocks of a document, and how to run them as a reader would: from the top, one after another."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import stele

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is its first line in the document."""

    document: Path
    line: int
    code: str


def blocks(name: str, *, language: str = "python", heading: str = "") -> list[Block]:
    """All blocks of `language` in a document, or of the part under one heading of the second level."""
    document = ROOT / name
    text = document.read_text()
    first, end = 0, len(text)
    if heading:
        first = text.index(f"\n## {heading}\n") + 1
        end = text.find("\n## ", first) % (len(text) + 1)
    return [
        Block(document, text.count("\n", 0, match.start()) + 2, match[2])
        for match in _BLOCK.finditer(text, first, end)
        if match[1] == language
    ]


def run(chosen: list[Block], names: dict[str, Any]) -> dict[str, Any]:
    """Run blocks in one namespace. A failure's traceback has the line of the document."""
    assert chosen
    for block in chosen:
        shifted = "\n" * (block.line - 1) + block.code
        tree = ast.fix_missing_locations(_Expecting().visit(ast.parse(shifted)))
        exec(compile(tree, str(block.document), "exec", dont_inherit=True), names)
    return names


class _Expecting(ast.NodeTransformer):
    """An `except` that asserts something of its error shows an error that comes: without it the block fails."""

    def visit_Try(self, node: ast.Try) -> ast.Try:
        """With `else: raise`, which readers are spared."""
        self.generic_visit(node)
        asserts = (isinstance(child, ast.Assert) for handler in node.handlers for child in handler.body)
        if any(asserts) and not node.orelse:
            fails = ast.parse(
                f"raise AssertionError('no error came from the try in line {node.lineno}')"
            ).body
            node.orelse = [ast.copy_location(fails[0], node)]
        return node


def make_table(client: stele.Client, example: str) -> None:
    """The table of a TabletGroup in examples/, as the operator would make it."""
    body = yaml.safe_load((ROOT / "examples" / example).read_text())
    spec = body["spec"]
    columns = [(c["name"], c["type"], c.get("nullable", False)) for c in spec["columns"]]
    schema = stele.Schema.make(columns, key=spec["primaryKey"])
    hashes = [stele.hash(*part["columns"], buckets=part["buckets"]) for part in spec["partitioning"]["hash"]]
    client.create_table(body["metadata"]["name"], schema, hashes)

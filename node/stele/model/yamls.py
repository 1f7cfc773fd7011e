"""Finds keys that stand twice in YAML: the parser would silently drop the first of the two. Opens no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Twice:
    """A key that appears again in its mapping: its place in the document, its line, and that of the first."""

    place: tuple[str | int, ...]
    key: str
    line: int
    first_line: int


def keys_twice(tree: yaml.Node | None) -> list[Twice]:
    """All keys of a document that stand twice in one mapping, by line."""
    found: list[Twice] = []
    waiting: list[tuple[yaml.Node, tuple[str | int, ...]]] = [] if tree is None else [(tree, ())]
    seen: set[int] = set()  # an alias stands for a node that was looked at
    while waiting:
        node, place = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend((value, (*place, n)) for n, value in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    waiting += ((key, place), (value, place))
                    continue
                waiting.append((value, (*place, key.value)))
                line = key.start_mark.line + 1
                if key.value in lines:
                    found.append(Twice((*place, key.value), key.value, line, lines[key.value]))
                elif key.tag != _MERGE:
                    lines[key.value] = line
    return sorted(found, key=lambda each: each.line)


class OnceLoader(yaml.SafeLoader):
    """Raises ConstructorError if keys of a document appear twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        if found := keys_twice(node):
            told = "; ".join(f"line {each.line}: {each.key!r} appears twice" for each in found)
            raise ConstructorError(None, None, told)
        return super().construct_document(node)

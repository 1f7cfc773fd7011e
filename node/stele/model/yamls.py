"""Strict reading of YAML that people write: within bounds, and no key twice. Opens no files.

Invariants: every fault of a text is a YAMLError, a ValueError or a RecursionError. Aliases expand a text to
VALUES_MAX values at most. The parser silently drops the first of two equal keys, so `keys_twice` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from stele.model.jsons import DEPTH_MAX, too_deep

VALUES_MAX = 100_000
"""A limit for values after aliases are expanded: a few lines of nested aliases can expand past any memory."""
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Twice:
    """A key that appears again in its mapping: its place in the document, its line, and that of the first."""

    place: tuple[str | int, ...]
    key: str
    line: int
    first_line: int


def keys_twice(tree: yaml.Node | None) -> list[Twice]:
    """Return all keys of a document that appear twice in one mapping, in the order of their lines."""
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


class BoundedLoader(yaml.SafeLoader):
    """Raises ConstructorError for a text that is too deep or expands to too much, and for a tag that fits no
    value."""

    def compose_document(self) -> yaml.Node | None:
        """The tree of the next document."""
        self._sizes: dict[int, int] = {}
        self._depth = 0
        return super().compose_document()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node of the tree. Counts the values that it expands to; an alias counts as much as its anchor."""
        if self._depth > DEPTH_MAX:
            raise ConstructorError(None, None, str(too_deep()))
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and id(node) not in self._sizes:
            self._sizes[id(node)] = size = 1 + sum(self._sizes.get(id(each), 1) for each in _inside(node))
            if size > VALUES_MAX:
                line = node.start_mark.line + 1
                raise ConstructorError(
                    None, None, f"line {line}: its aliases expand to more than {VALUES_MAX:,} values"
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. A value that does not fit its tag, such as !!int, is a fault of the text."""
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError, TypeError, OverflowError) as exc:
            line, kind = node.start_mark.line + 1, node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"line {line}: the value is not of type {kind}") from exc


class OnceLoader(BoundedLoader):
    """Raises ConstructorError if keys of a document appear twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        if found := keys_twice(node):
            told = "; ".join(f"line {each.line}: {each.key!r} appears twice" for each in found)
            raise ConstructorError(None, None, told)
        return super().construct_document(node)


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []

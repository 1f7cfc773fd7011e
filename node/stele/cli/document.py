"""Strict reading of YAML and JSON that people write. The caller asks for each value by type.

Opens no files. Invariant: nothing is guessed. Unknown keys and values of a wrong type are faults. Each fault
names file, line and place, and all faults of a document are reported together, in the order of their lines.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from stele.cli.errors import ManyFaults
from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.jsons import refuse_deep, too_deep
from stele.model.nearest import did_you_mean
from stele.model.yamls import BoundedLoader, keys_twice

_FAULTS_TOLD = 20
Place = tuple[str | int, ...]


class _Loader(BoundedLoader):
    """Reads fractions as Decimal, so that no digit is lost before they meet their column's type."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> decimal.Decimal | float:
    try:
        return decimal.Decimal(loader.construct_scalar(node))
    except decimal.InvalidOperation:  # .inf and .nan
        return loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


@dataclass(slots=True)
class Document:
    """A document and its faults so far. `where`: the start of error messages, usually the file's name."""

    where: str
    value: Any
    _tree: yaml.Node | None = None
    _faults: list[tuple[int, str]] = field(default_factory=list)
    """(line, or 0 if it is unknown; what is wrong)"""

    @property
    def root(self) -> Entry:
        """The whole document as an entry."""
        return Entry(self, (), self.value)

    def fault(self, place: Place, said: str, line: int = 0) -> None:
        """Record a fault. `line`: where it is; by default the line of the place."""
        line = line or (_line(self._tree, place) if place else 0)
        at = [f"line {line}"] if line else []
        at += [_named(place)] if place else []
        self._faults.append((line, ": ".join(filter(None, (", ".join(at), said)))))

    @property
    def faults(self) -> int:
        """The number of faults so far."""
        return len(self._faults)

    def refuse_faults(self) -> None:
        """Raises Rejected with all recorded faults."""
        if self._faults:
            in_order = sorted(self._faults, key=lambda fault: fault[0])
            told = [said for _, said in in_order[:_FAULTS_TOLD]]
            if more := len(self._faults) - len(told):
                told.append(f"and {more} more")
            raise ManyFaults(self.where, told)


def parse(where: str, text: str) -> Document:
    """Parse a YAML or JSON text. A key that appears twice is a fault of the document.

    Raises:
        Rejected: it is neither.
    """
    twice: list[str] = []
    try:
        value = json.loads(
            text, parse_float=decimal.Decimal, object_pairs_hook=lambda pairs: _mapping(pairs, twice)
        )
        refuse_deep(value)
    except (ValueError, RecursionError):
        return _parse_yaml(where, text)
    try:
        return _found(where, value, yaml.compose(text, _Loader))
    except (yaml.YAMLError, RecursionError):  # JSON that YAML refuses; its faults have no line numbers
        document = Document(where, value, None)
        for key in twice:
            document.fault((), f"{shown(key)} appears twice")
        return document


def _found(where: str, value: Any, tree: yaml.Node | None) -> Document:
    document = Document(where, value, tree)
    for each in keys_twice(tree):
        said = f"{shown(each.key)} appears twice; the first is on line {each.first_line}"
        document.fault(each.place, said, each.line)
    return document


def _mapping(pairs: list[tuple[str, Any]], twice: list[str]) -> dict[str, Any]:
    """A JSON object; keys that appear twice are added to `twice`."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            twice.append(key)
        found[key] = value
    return found


def _parse_yaml(where: str, text: str) -> Document:
    try:
        loader = _Loader(text)
        try:
            tree = loader.get_single_node()
            value = loader.construct_document(tree) if tree is not None else None
        finally:
            loader.dispose()
    except (
        yaml.YAMLError,
        ValueError,
    ) as exc:  # ValueError: a number of thousands of digits, an impossible date
        raise Rejected(f"{where}: not valid YAML or JSON: {_why(exc)}") from exc
    except RecursionError:
        raise Rejected(f"{where}: not valid YAML or JSON: {too_deep()}") from None
    return _found(where, value, tree)


def _why(error: Exception) -> str:
    """The line and the cause, in one line, with what was being parsed if the parser says so."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    mark = error.problem_mark
    at = f" {error.context}" if error.context else ""
    if error.context_mark is not None and error.context_mark.line != mark.line:
        at += f", which begins on line {error.context_mark.line + 1}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{at}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and its place in the document.

    If the caller asks for another type, the entry records a fault and returns an empty value of that type. So
    the rest of the document is still checked.
    """

    document: Document
    place: Place
    value: Any

    def fault(self, said: str) -> None:
        """Record a fault of this value."""
        self.document.fault(self.place, said)

    def _unexpected(self, expected: str) -> None:
        self.fault(f"{_called(self.value)}; expected {expected}")

    def mapping(self, known: Collection[str], required: Collection[str] = ()) -> dict[str, Entry]:
        """The values of a mapping by key, without null values. A key that is not in `known` is a fault."""
        if not isinstance(self.value, Mapping):
            self._unexpected(f"a mapping with {_listed(required or known)}")
            return {}
        found = {}
        for key, value in self.value.items():
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; known keys are {_listed(known)}"
                place: Place = (*self.place, key) if isinstance(key, str) else self.place
                self.document.fault(place, f"unknown key {shown(key)}{hint}")
            elif value is not None:
                found[key] = Entry(self.document, (*self.place, key), value)
        for key in required:
            if key not in found:
                self.fault(f"{key} is missing")
        return found

    def get(self, key: str) -> Entry | None:
        """One value of a mapping; None if it is not there, or null."""
        value = self.value.get(key) if isinstance(self.value, Mapping) else None
        return None if value is None else Entry(self.document, (*self.place, key), value)

    def entries(self, expected: str) -> list[Entry]:
        """The values of a list."""
        if not isinstance(self.value, list):
            self._unexpected(f"a list of {expected}")
            return []
        return [Entry(self.document, (*self.place, n), value) for n, value in enumerate(self.value)]

    def one_of(self, words: Collection[str]) -> str:
        """The value, which must be one of these words."""
        if isinstance(self.value, str) and self.value in words:
            return self.value
        self._unexpected(f"one of {_listed(words)}" if len(words) > 1 else _listed(words))
        return ""

    def text(self, expected: str = "text") -> str:
        """A non-empty text."""
        if isinstance(self.value, str) and self.value:
            return self.value
        unquoted = isinstance(self.value, (bool, int, float, decimal.Decimal)) or hasattr(
            self.value, "isoformat"
        )
        self._unexpected(f"{expected}{'; put it in quotes' if unquoted else ''}")
        return ""

    def texts(self, expected: str) -> list[str]:
        """The value as a list of non-empty texts. What does not fit is a fault: `expected` says what was."""
        return [entry.text() for entry in self.entries(expected)]

    def whole_number(self, least: int) -> int:
        """A whole number, `least` or more."""
        if isinstance(self.value, int) and not isinstance(self.value, bool) and self.value >= least:
            return self.value
        self._unexpected(f"a whole number, {least} or more")
        return least

    def one_of_numbers(self, numbers: Sequence[int]) -> int:
        """The value, which must be one of these whole numbers."""
        if isinstance(self.value, int) and not isinstance(self.value, bool) and self.value in numbers:
            return self.value
        *others, last = map(str, numbers)
        self._unexpected(f"{', '.join(others)} or {last}")
        return numbers[0]

    def flag(self) -> bool:
        """True or false."""
        if isinstance(self.value, bool):
            return self.value
        self._unexpected("true or false")
        return False

    def scalar(self) -> Any:
        """A text, a number, true or false. A date or time is returned as ISO 8601 text."""
        if isinstance(self.value, (str, int, float, decimal.Decimal)):
            return self.value
        if hasattr(self.value, "isoformat"):
            return self.value.isoformat()
        self._unexpected("a text, a number, true or false")
        return None


def _called(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {shown(value)}" if value else "an empty text"
        case Mapping():
            return "a mapping"
        case list():
            return "a list"
        case decimal.Decimal():
            return str(value)
        case _:
            return shown(value)


def _listed(words: Collection[str]) -> str:
    return ", ".join(words)


def _named(place: Place) -> str:
    """A place in words, such as "columns[1].type"."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _line(node: yaml.Node | None, place: Place) -> int:
    """The line of a value, from 1; 0 if unknown. For a missing value: the line of the nearest value around
    it."""
    if node is None:
        return 0
    line = node.start_mark.line + 1
    for step in place:
        found = None
        if isinstance(node, yaml.MappingNode):
            pairs = reversed(node.value)  # of a key that appears twice, the last one counts
            found = next(((key, value) for key, value in pairs if key.value == step), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = (node.value[step], node.value[step])
        if found is None:
            return line
        key, node = found
        line = key.start_mark.line + 1
    return line

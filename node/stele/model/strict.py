"""Strict reading of JSON objects that people and foreign programs write: commands and actions of Flight clients.

Invariant: nothing is guessed. A field that is not known, or whose value has a wrong type, is a fault, and all faults are
reported together. A field that is null counts as absent. An unknown field that is false, 0 or empty also counts as
absent. A later program may send it, and such a value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from stele.model.nearest import did_you_mean

_SHOWN_CHARS_MAX = 60


class Fields:
    """An object whose fields are taken one by one. Call `refuse_faults` after the last one.

    `known`: the names of all its fields. `place`: where the object is, if it is inside another.
    """

    def __init__(
        self, value: Any, known: Collection[str], place: str = "", faults: list[str] | None = None
    ) -> None:
        self._place = place
        self._faults: list[str] = [] if faults is None else faults
        self._value: dict[str, Any] = {}
        if not isinstance(value, dict):
            self.fault("", value, "an object")
            return
        self._value = {name: each for name, each in value.items() if each is not None}
        for name, each in self._value.items():
            if name not in known and each:
                hint = did_you_mean(name, known) or f"; known fields are {', '.join(known)}"
                self._faults.append(f"{place}unknown field {_shown(name)}{hint}")

    def fault(self, name: str, value: Any, expected: str) -> None:
        """Record that a field has another value than is expected."""
        at = f"{self._place}{name}" if name else self._place.removesuffix(".") or "the body"
        self._faults.append(f"{at}: {_shown(value)}; expected {expected}")

    def refuse_faults(self) -> None:
        """Raises ValueError with all faults."""
        if self._faults:
            raise ValueError("; ".join(self._faults))

    def get(self, name: str, *, required: bool = False) -> Any:
        """The value of a field; None if it is absent."""
        found = self._value.get(name)
        if found is None and required:
            self._faults.append(f"{self._place}field {name} is missing")
        return found

    def text(self, name: str, *, required: bool = False) -> str:
        """A text; "" if it is absent."""
        found = self.get(name, required=required)
        if found is None or isinstance(found, str):
            return found or ""
        self.fault(name, found, "a text")
        return ""

    def texts(self, name: str, *, required: bool = False) -> tuple[str, ...]:
        """A list of texts; empty if it is absent."""
        found = self.items(name, required=required)
        for number, each in enumerate(found):
            if not isinstance(each, str):
                self.fault(f"{name}[{number}]", each, "a text")
        return tuple(str(each) for each in found)

    def items(self, name: str, *, required: bool = False) -> list[Any]:
        """A list; empty if it is absent."""
        found = self.get(name, required=required)
        if found is None or isinstance(found, list):
            return found or []
        self.fault(name, found, "a list")
        return []

    def objects(self, name: str, known: Collection[str]) -> list[Fields]:
        """A list of objects; their faults are reported with those of this one."""
        return [
            Fields(each, known, f"{self._place}{name}[{number}].", self._faults)
            for number, each in enumerate(self.items(name))
        ]

    def number(
        self, name: str, most: int, least: int = 0, *, default: int = 0, required: bool = False
    ) -> int:
        """A whole number from `least` to `most`; `default` if it is absent."""
        found = self.get(name, required=required)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int):
            self.fault(name, found, f"a whole number, {least} to {most}")
            return least
        if not least <= found <= most:
            self.fault(name, found, f"{least} to {most}")
            return least
        return found

    def flag(self, name: str) -> bool:
        """Return a field that is true or false; False if it is absent."""
        found = self.get(name)
        if found is None or isinstance(found, bool):
            return bool(found)
        self.fault(name, found, "true or false")
        return False


def _shown(value: Any) -> str:
    """A value for a message, as JSON."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."

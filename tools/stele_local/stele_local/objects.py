"""Small pure helpers for JSON objects: times, names, merge patches, paths, quantities. Of stele_local it
imports only `status`.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

Json = dict[str, Any]
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # as in the API server; without vowels no words appear
_chance = random.SystemRandom()
_UNITS: dict[str, int | Decimal] = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_STEP = re.compile(
    r"\.?([^.\[\]\\]+(?:\\.[^.\[\]\\]*)*)|\[(\d+)\]|\['([^']+)'\]|\[\?\(@\.([\w.]+)\s*==\s*[\"']([^\"']*)[\"']\)\]|\[\*\]"
)


def now() -> str:
    """The present time in UTC and whole seconds, in the format of metadata."""
    return stamp(datetime.datetime.now(datetime.UTC))


def stamp(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def age(text: str | None) -> str:
    """The time since the timestamp `text`, in kubectl's short form."""
    if not text:
        return "<unknown>"
    seconds = max(0, int((datetime.datetime.now(datetime.UTC) - parse_time(text)).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


def random_suffix() -> str:
    return "".join(_chance.choice(_ALPHABET) for _ in range(5))


def merge_patch(target: Any, patch: Any) -> Any:
    """The object after a merge patch (RFC 7386). The arguments are not changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def find(obj: Any, *keys: str, default: Any = None) -> Any:
    """The value below `keys`, or `default` if any of them is missing or null."""
    for key in keys:
        if not isinstance(obj, dict) or obj.get(key) is None:
            return default
        obj = obj[key]
    return obj


def drop_nulls(value: Any) -> Any:
    """A copy without null fields. A real API server decodes objects of built-in kinds in this way."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def without(obj: Json, *keys: str) -> Json:
    return {key: value for key, value in obj.items() if key not in keys}


def json_path(obj: Any, path: str) -> Iterator[Any]:
    """The values that the JSONPath of a printer column names. Supported: fields, indexes, and filters that
    compare one field.
    """
    found, position = [obj], 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None or step.end() == position:
            raise ValueError(f"JSONPath {path!r}: cannot read the part {path[position:]!r}")
        name, index, quoted, key, wanted = step.groups()
        name = quoted or (name and re.sub(r"\\(.)", r"\1", name))
        if name is not None:
            found = [
                value[name] for value in found if isinstance(value, dict) and value.get(name) is not None
            ]
        else:
            lists = [value for value in found if isinstance(value, list)]
            if index is not None:
                found = [value[int(index)] for value in lists if int(index) < len(value)]
            else:
                found = [
                    i for value in lists for i in value if key is None or find(i, *key.split(".")) == wanted
                ]
        position = step.end()
    yield from found


def quantity(text: str | int | float) -> Decimal:
    """A Kubernetes quantity ("10Gi", "500m") as a number of its base unit.

    Raises:
        ValueError: the text is not a quantity.
    """
    parts = re.fullmatch(r"([+-]?[0-9.]+)([A-Za-z]{0,2})", str(text))
    if parts is None or parts[2] not in _UNITS or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", parts[1]):
        raise ValueError(
            f"{text!r} is not a quantity: expected a number and one of {', '.join(u for u in _UNITS if u)}"
        )
    return Decimal(parts[1]) * _UNITS[parts[2]]

"""Draws hostile input from one seed: bytes, text, numbers, JSON trees, protobuf messages of any type of ours.

Opens nothing. Invariant: the same `random.Random` gives the same inputs in the same order.
"""

from __future__ import annotations

import copy
import json
import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INT_BITS = {
    FieldDescriptor.TYPE_INT32: (32, True),
    FieldDescriptor.TYPE_SINT32: (32, True),
    FieldDescriptor.TYPE_INT64: (64, True),
    FieldDescriptor.TYPE_SINT64: (64, True),
    FieldDescriptor.TYPE_UINT32: (32, False),
    FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_UINT64: (64, False),
    FieldDescriptor.TYPE_FIXED64: (64, False),
}
_PYTHON = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_BOOL: bool,
}
_EDGES = (0, 1, 2, 3, 7, 9, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
_WIDE_EDGES = (2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
_WORDS = (
    "",
    "x",
    "id",
    "t",
    "\0",
    "\x1b[2J\x1b]0;owned\x07",
    "../../etc/passwd",
    "/dev/full",
    "a" * 300,
    "é\u202e",
    "%s%n",
)
_JSON_ODDITIES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 2**64, -(2**70), 0.5, 1e300),
    *("", "x", "../x", "\0", [], {}, [[]], [[[[]]]], {"x": None}, "9" * 5_000),
)
_MARK = "a place for what is deep"
_BETWEEN = re.compile(rb"([\s,:()\[\]{}]+)")
_LONG_BYTES = 1 << 16
_DEPTH_MAX = 4
_REPEATED_MAX = 3


class Draw:
    """`pool` gives likely values by field name, such as identifiers that exist. `big_bytes`: of the rare long strings."""

    def __init__(
        self,
        rng: random.Random,
        pool: Mapping[str, Sequence[Any]] | None = None,
        *,
        big_bytes: int = _LONG_BYTES,
    ) -> None:
        self.rng = rng
        self._pool = pool or {}
        self._big_bytes = big_bytes

    # --- values

    def number(self, bits: int, signed: bool) -> int:
        """A number that fits; often one at an edge."""
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        kind = self.rng.randrange(4)
        if kind == 0:
            value = self.rng.choice((low, high, high - 1, low + 1))
        elif kind == 1:
            value = self.rng.choice(_EDGES + _WIDE_EDGES)
        elif kind == 2:
            value = self.rng.randrange(64)
        else:
            value = self.rng.randint(low, high)
        return max(low, min(high, value))

    def blob(self) -> bytes:
        """Some bytes: an identifier, none, few, many."""
        size = self.rng.choice(
            (0, 1, 15, 16, 16, 16, 17, 24, 200, self._big_bytes if self.rng.random() < 0.1 else 64)
        )
        return self.rng.randbytes(size)

    def text(self) -> str:
        """Some text that UTF-8 can hold."""
        if self.rng.random() < 0.05:
            return "n" * self._big_bytes
        if self.rng.random() < 0.6:
            return self.rng.choice(_WORDS)
        return "".join(self.rng.choices(string.printable, k=self.rng.randrange(40)))

    # --- bytes

    def spoil(self, data: bytes) -> bytes:
        """The bytes with one to four faults: flipped, cut, doubled, inserted, overwritten by edges of integers."""
        out = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            at = self.rng.randrange(len(out) + 1)
            match self.rng.randrange(7):
                case 0 if out:
                    out[at % len(out)] ^= 1 << self.rng.randrange(8)
                case 1 if out:
                    out[at % len(out)] = self.rng.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    del out[at:]
                case 3:
                    del out[at : at + self.rng.randrange(1, 17)]
                case 4:
                    out[at:at] = self.rng.randbytes(self.rng.randrange(1, 17))
                case 5:
                    size = self.rng.choice((2, 4, 8))
                    edge = self.rng.choice(_EDGES + _WIDE_EDGES) & ((1 << 8 * size) - 1)
                    out[at : at + size] = edge.to_bytes(size, self.rng.choice(("little", "big")))
                case _:
                    end = at + self.rng.randrange(1, 65)
                    out[at:at] = out[at:end]
        return bytes(out)

    # --- JSON

    def json_tree(self, value: Any) -> Any:
        """A copy of a JSON value with one to three nodes replaced, removed, doubled or nested."""
        box = [copy.deepcopy(value)]
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            places = list(_places(box))
            parent, key = places[self.rng.randrange(len(places))]
            match self.rng.randrange(6):
                case 0 if isinstance(parent, dict):
                    del parent[key]
                case 1 if isinstance(parent, list) and parent is not box:
                    del parent[key]
                case 2 if isinstance(parent, list) and parent is not box:
                    parent.insert(key, copy.deepcopy(parent[key]))
                case 3:
                    parent[key] = [parent[key]]
                case 4 if isinstance(parent[key], str) and parent[key]:
                    parent[key] = self.spoil(parent[key].encode()).decode(errors="replace")
                case 5 if isinstance(parent[key], int):
                    parent[key] = self.number(64, True)
                case _:
                    parent[key] = copy.deepcopy(self.rng.choice(_JSON_ODDITIES))
        return box[0]

    def deep_json(self, value: Any) -> bytes:
        """A JSON text with one node so deep that a parser may run out of stack."""
        changed = [copy.deepcopy(value)]
        places = list(_places(changed))
        parent, key = places[self.rng.randrange(len(places))]
        parent[key] = _MARK
        depth = self.rng.choice((50, 300, 900, 3_000, 50_000, self.rng.randrange(940, 1_000)))
        opens, closes = self.rng.choice((("[", "]"), ('{"x":', "}")))
        deep = f"{opens * depth}1{closes * depth}"
        return json.dumps(changed[0]).replace(json.dumps(_MARK), deep).encode()

    def with_words(self, data: bytes, words: Sequence[bytes]) -> bytes:
        """The bytes with one to three words put between, or in the place of, others."""
        parts = _BETWEEN.split(data)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            at = self.rng.randrange(len(parts))
            word = self.rng.choice(words)
            match self.rng.randrange(3):
                case 0:
                    parts[at] = word
                case 1:
                    parts[at:at] = [word, b" "]
                case _:
                    parts[at:at] = [word]
        return b"".join(parts)

    # --- protobuf

    def message(self, descriptor: Descriptor, *, hostile: float = 0.15, depth: int = 0) -> Message:
        """A message of this type. A field is left out, plausible, or with the probability `hostile` anything it can hold."""
        made = GetMessageClass(descriptor)()
        oneofs = {o.name: self.rng.choice(o.fields).name for o in descriptor.oneofs}
        for field in descriptor.fields:
            of = field.containing_oneof
            if of is not None and oneofs[of.name] != field.name:
                continue
            if self.rng.random() < 0.1 and of is None:
                continue
            if field.is_repeated:
                values = getattr(made, field.name)
                for _ in range(self.rng.randrange(_REPEATED_MAX)):
                    self._append(values, field, hostile, depth)
            elif field.message_type is not None:
                if depth < _DEPTH_MAX:
                    getattr(made, field.name).CopyFrom(
                        self.message(field.message_type, hostile=hostile, depth=depth + 1)
                    )
            else:
                setattr(made, field.name, self._scalar(field, hostile))
        return made

    def _append(self, values: Any, field: FieldDescriptor, hostile: float, depth: int) -> None:
        if field.message_type is None:
            values.append(self._scalar(field, hostile))
        elif depth < _DEPTH_MAX:
            values.append(self.message(field.message_type, hostile=hostile, depth=depth + 1))

    def _scalar(self, field: FieldDescriptor, hostile: float) -> Any:
        wanted = _PYTHON.get(field.type, int)
        likely = [value for value in self._pool.get(field.name, ()) if type(value) is wanted]
        if likely and self.rng.random() >= hostile:
            return self.rng.choice(likely)
        strange = self.rng.random() < hostile
        if field.type in _INT_BITS:
            bits, signed = _INT_BITS[field.type]
            return self.number(bits, signed) if strange else self.rng.randrange(8)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return self.rng.choice((9, 99, -1, 2**31 - 1)) if strange else self.rng.choice(known)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.blob() if strange else self.rng.randbytes(16)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.text() if strange else self.rng.choice(("a", "b", "127.0.0.1:1"))
        raise TypeError(f"{field.full_name}: a type that no message of ours has")


def _places(value: Any) -> Any:
    """Each (container, key) below a value."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])

"""Refuses an encoded message that consists of too many parts, before it is decoded. Used where requests and
frames are decoded.

A part is a message within another one, or a text in a list. It may take two bytes of the wire, but takes up
to 190 bytes once decoded. So 16 MiB of empty parts would take 1.5 GiB, and keep the event loop for seconds.
The parts of a request are charged to the budget, beside its bytes. Those of a frame are not, because few of
them stay in memory for long.

Invariant: what passes has one part for each PART_BYTES at most, or PARTS_FREE, or is small. Malformed bytes
are looked at as far as they can be read: the decoder stops there too. A walk keeps the loop for
STEPS_AT_ONCE fields, or for STEPS_MAX on streams, whose frames are decoded without a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stele.model.errors import Code, Rejected

SMALL_FRAME_BYTES = 256 << 10
SMALL_CALL_BYTES = 4 << 10
"""Frames and requests of at most this size are not checked. Nearly all are smaller."""
DECODED_BYTES = 192
"""Bytes charged for a part. The largest, a replica's status, takes 186 bytes once decoded."""
PARTS_FREE = 1 << 18
"""Parts that any message may have: more than the tablets or split keys of a request. It is also more than the
entries of a frame between nodes, whose batches end at half a megabyte."""
PART_BYTES = 32
"""Beyond PARTS_FREE, a message may have one part for each so many of its bytes. A large report, of more than
20,000 replicas, has about 60 bytes for each part."""
STEPS_AT_ONCE = 4_096
"""Fields that are looked at in one turn of the loop. They take about a millisecond."""
STEPS_MAX = 1 << 18
"""The most fields that are looked at in a frame. The bytes of an entry, a block or a value are one field."""
_VARINT_BYTES_MAX = 10
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_NESTED = 2  # the wire type of messages and texts
_Plan = dict[int, "_Plan"]
"""By tag, the fields of a message that are parts; empty for a text."""
_plans: dict[str, _Plan] = {}


def refuse_parts(raw: bytes, descriptor: Descriptor) -> None:
    """Refuse a frame of a stream that has too many parts.

    Raises:
        Rejected: TOO_LARGE.
    """
    if len(raw) > SMALL_FRAME_BYTES:
        for _ in _Walk(raw, descriptor).turns(STEPS_MAX):
            raise _too_many(raw, f"more than {STEPS_MAX} fields")


async def bytes_of_parts(raw: bytes, descriptor: Descriptor) -> int:
    """Return the bytes to charge for the parts of a unary request; 0 if it is small. Other tasks get turns
    meanwhile, so the number of fields needs no bound.

    Raises:
        Rejected: TOO_LARGE.
    """
    if len(raw) <= SMALL_CALL_BYTES:
        return 0
    walk = _Walk(raw, descriptor)
    for _ in walk.turns(STEPS_AT_ONCE):
        await asyncio.sleep(0)
    return walk.parts * DECODED_BYTES


def _too_many(raw: bytes, what: str) -> Rejected:
    return Rejected(f"a message of {len(raw)} bytes has {what}; send less at once", code=Code.TOO_LARGE)


def _plan(descriptor: Any) -> _Plan:
    plan = _plans.get(descriptor.full_name)
    if plan is None:
        plan = _plans[descriptor.full_name] = {}  # known before it is filled: a message may contain itself
        for field in descriptor.fields:
            if field.message_type is not None:
                plan[field.number << 3 | _NESTED] = _plan(field.message_type)
            elif field.is_repeated and field.type in _TEXTS:
                plan[field.number << 3 | _NESTED] = {}
    return plan


class _Walk:
    """A walk through an encoded message. `parts`: how many it has met, once it has ended."""

    __slots__ = ("_descriptor", "_raw", "parts")

    def __init__(self, raw: bytes, descriptor: Descriptor) -> None:
        self._raw = raw
        self._descriptor = descriptor
        self.parts = 0

    def turns(self, fields: int) -> Iterator[None]:
        """Walk; yields after each `fields` of them. Raises Rejected once there are too many parts."""
        try:
            yield from self._walk(fields)
        except IndexError:  # cut off
            return

    def _walk(self, fields: int) -> Iterator[None]:
        raw, plan = self._raw, _plan(self._descriptor)
        parts_max = max(PARTS_FREE, len(raw) // PART_BYTES)
        at, end, steps = 0, len(raw), 0
        outer: list[tuple[int, _Plan]] = []
        while True:
            while at >= end:
                if not outer:
                    return
                end, plan = outer.pop()
            steps += 1
            if steps == fields:
                steps = 0
                yield
            tag = raw[at]
            at += 1
            if tag >= 0x80:
                tag, at = _varint(raw, at - 1)
            kind = tag & 7
            if kind == _NESTED:
                size = raw[at]
                at += 1
                if size >= 0x80:
                    size, at = _varint(raw, at - 1)
                inner = plan.get(tag)
                if inner is not None:
                    self.parts += 1
                    if self.parts > parts_max:
                        raise _too_many(raw, f"more than {parts_max} parts")
                    if inner and size:
                        outer.append((end, plan))
                        end, plan = at + size, inner
                        continue
                at += size
            elif kind == 0:
                at += 1
                if raw[at - 1] >= 0x80:
                    _, at = _varint(raw, at - 1)
            elif kind == 1:
                at += 8
            elif kind == 5:
                at += 4


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """(value, offset behind it). Raises IndexError if there is none."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("no varint")

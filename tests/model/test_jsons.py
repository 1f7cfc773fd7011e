"""JSON of others: a value, or a ValueError; nothing else, and no number that is none."""

from __future__ import annotations

import json

import google_crc32c
import pytest

from stele.model.errors import Corrupt, Rejected
from stele.model.ids import NodeId
from stele.model.jsons import parse_json, parse_next_json
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.ticket import ScanCommand, decode_ticket
from stele.wal.metadata import _HEADER, _MAGIC, _VERSION, Metadata, Position, decode_metadata, encode_metadata

NODE = NodeId("ab" * 16)
HARD = (
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 5_000,
    "1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "",
    "{",
    "\x00",
)


@pytest.mark.parametrize("text", HARD, ids=lambda text: text[:8])
def test_what_is_no_json_of_ours_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    with pytest.raises(ValueError):
        parse_json(text.encode())
    with pytest.raises(ValueError):
        parse_next_json(f"[{text}", 1)


@pytest.mark.parametrize("text", HARD, ids=lambda text: text[:8])
def test_whoever_sends_it_is_refused(text: str) -> None:
    for refuse in (
        lambda: decode_ticket(b"\x01" + text.encode()),
        lambda: ScanCommand.decode(b'\x01{"table":"t","snapshot":' + text.encode() + b"}"),
        lambda: Schema.from_json(text),
        lambda: PartitionSchema.from_json(text),
        lambda: Schema.make([("a", "int64", False, text)], ["a"]),
    ):
        with pytest.raises(Rejected):
            refuse()


def test_values_are_those_of_json() -> None:
    for value in (None, True, 0, -7, 1.5, "x", [1, [2]], {"a": {"b": []}}, 1 << 80):
        assert parse_json(json.dumps(value)) == value
        assert parse_next_json(f"  {json.dumps(value)},"[2:], 0) == (value, len(json.dumps(value)))


def test_a_partitioning_without_its_range_keys_is_refused() -> None:
    with pytest.raises(Rejected, match="partitioning"):
        PartitionSchema.from_json('{"hash":[],"range":[]}')


def test_metadata_that_is_whole_and_no_metadata_is_damage() -> None:
    whole = encode_metadata(Metadata(NODE, 1, 0, Position(1, 4_096), ()))
    assert decode_metadata(whole, "metadata").first_sequence == 1
    for body in (b"[]", b"{}", b"[" * 100_000, b'{"node_id":"x","first_sequence":1e999}'):
        data = _HEADER.pack(_MAGIC, _VERSION, google_crc32c.value(body), len(body)) + body
        with pytest.raises(Corrupt, match="the file is damaged"):
            decode_metadata(data, "metadata")

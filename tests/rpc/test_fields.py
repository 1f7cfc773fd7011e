"""Every field that a unary request can have, at any depth, is in the tables of bounds; and no request gets by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from stele.model.errors import Code, Rejected
from stele.rpc import fields
from stele.rpc.fields import APART, COUNTS, LENGTHS, NUMBERS, UNREAD, bound_of, refuse_beyond_bounds
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2

HUGE = (1 << 64) - 1


def requests() -> list[Descriptor]:
    return [
        method.input_type
        for module in (master_pb2, consensus_pb2, tserver_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.input_type.name not in APART
    ]


def reachable() -> Iterator[tuple[Descriptor, FieldDescriptor]]:
    seen, todo = set(), requests()
    while todo:
        message = todo.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            yield message, field
            if field.message_type is not None:
                todo.append(field.message_type)


def test_every_field_of_every_request_has_its_bound() -> None:
    missing = []
    for message, field in reachable():
        if f"{message.name}.{field.name}" in UNREAD:
            continue
        texts = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        for table, needed in (
            (LENGTHS, texts),
            (COUNTS, field.is_repeated),
            (NUMBERS, field.type in fields._WIDE),
        ):
            if needed and bound_of(table, message.name, field.name) is None:
                missing.append(f"{message.name}.{field.name}")
    assert missing == []


def test_no_bound_is_of_a_field_that_is_gone() -> None:
    names = {n for message, field in reachable() for n in (field.name, f"{message.name}.{field.name}")}
    assert {*LENGTHS, *COUNTS, *NUMBERS, *UNREAD} <= names


PEER = common_pb2.PeerPB(replica_id=1, member_type=common_pb2.VOTER)
BEYOND: list[tuple[Message, str]] = [
    (master_pb2.RegisterNodeRequest(name="n" * 6_000_000), "RegisterNodeRequest.name has 6000000 characters; at most 253 are allowed"),
    (master_pb2.SetNodeStateRequest(reason="é" * 5_000), "SetNodeStateRequest.reason has 5000 characters"),
    (master_pb2.SetNodeStateRequest(state=9), "SetNodeStateRequest.state is 9"),  # type: ignore[arg-type]
    (master_pb2.SetNodeStateRequest(epoch=HUGE), "SetNodeStateRequest.epoch is 18446744073709551615"),
    (master_pb2.ClaimDriverRequest(holder="h" * 600), "ClaimDriverRequest.holder has 600"),
    (master_pb2.ClaimDriverRequest(holder="h", ttl_ms=HUGE), "ClaimDriverRequest.ttl_ms"),
    (master_pb2.BeginIntentRequest(intent=master_pb2.IntentPB(kind="k" * 65)), "IntentPB.kind has 65"),
    (master_pb2.EndIntentRequest(committed_config=common_pb2.ConfigurationPB(peers=[PEER] * 1_001)), "ConfigurationPB.peers has 1001 items"),
    (master_pb2.EndIntentRequest(committed_config=common_pb2.ConfigurationPB(opid_index=-2)), "ConfigurationPB.opid_index is -2"),
    (
        consensus_pb2.BulkChangeConfigRequest(peer=common_pb2.PeerPB(address="a" * 513)),
        "PeerPB.address has 513",
    ),
    (
        consensus_pb2.BulkChangeConfigRequest(peer=common_pb2.PeerPB(member_type=7)),  # type: ignore[arg-type]
        "PeerPB.member_type is 7",
    ),
    (consensus_pb2.BulkChangeConfigRequest(type=9), "BulkChangeConfigRequest.type is 9"),  # type: ignore[arg-type]
    (
        consensus_pb2.StartTabletCopyRequest(witness_start=common_pb2.OpIdPB(term=1, index=HUGE)),
        "OpIdPB.index",
    ),
    (
        tserver_pb2.CreateTabletRequest(partition=common_pb2.PartitionPB(range_end=b"k" * 9_000)),
        "PartitionPB.range_end has 9000 bytes",
    ),
    (master_pb2.GetTabletLocationsRequest(tablet_ids=[b""] * 100_001), "tablet_ids has 100001 items"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "words"), BEYOND, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_a_request_beyond_a_bound_is_refused_with_field_size_and_bound(request_: Message, words: str) -> None:
    with pytest.raises(Rejected) as refused:
        refuse_beyond_bounds(request_)
    assert words in str(refused.value) and refused.value.code is Code.INVALID_ARGUMENT


def test_what_is_within_its_bounds_passes() -> None:
    refuse_beyond_bounds(master_pb2.RegisterNodeRequest(name="n" * 253, role="node"))
    refuse_beyond_bounds(
        tserver_pb2.CreateTabletRequest(
            table_name="n" * 10_000, config=common_pb2.ConfigurationPB(opid_index=-1, peers=[PEER])
        )
    )

"""Raft messages over the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model.bounds import TEXT_CHARS_MAX
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId, new_id
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.rpc.convert import peer_from_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto.consensus_pb2 import ConsensusMessage
from stele.rpc.proto.consensus_pb2 import TimeoutNow as TimeoutNowPB
from stele.tserver.messages import QUIET, encode_body, encode_head, message_from_pb

MESSAGES: list[Message] = [
    UpdateRequest(3, OpId(2, 7), (), 7, 5, 1_234, 6),
    UpdateRequest(
        3,
        OpId(2, 7),
        (Entry(3, 8, EntryKind.NOOP, 0, b"config"), Entry(3, 9, EntryKind.WRITE, 1 << 62, bytes(range(256)))),
        7,
    ),
    UpdateRequest(1, OpId(0, 0), (), 0),
    UpdateRequest(3, OpId(2, 7), (), 7, 0, 1_234, 6, 300, 987_654),
    UpdateResponse(3, True, OpId(3, 9), 0, 0, 5, 1_234, True, False, 7),
    UpdateResponse(3, False, OpId(0, 0), 4, 2, 0, 0, False, True, 7),
    UpdateResponse(3, True, OpId(3, 9), 0, 0, 5, 1_234, True, False, 7, 987_654),
    VoteRequest(4, OpId(3, 9), True, True, NodeId(new_id())),
    VoteRequest(4, OpId(3, 9), False, True, NodeId(new_id()), 3),
    VoteResponse(4, True, True, 4, True, False),
    TimeoutNow(9),
    TimeoutNow(9, "", True),
    TimeoutNow(9, "heal/7f3a91c2-12: its node drains"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    tablet = bytes.fromhex(new_id())
    raw = encode_head(tablet, ReplicaId(300), ReplicaId(2), 1) + encode_body(message) + QUIET
    envelope = ConsensusMessage.FromString(raw)
    assert message_from_pb(envelope) == message
    assert (envelope.tablet_id, envelope.from_replica, envelope.to_replica) == (tablet, 300, 2)
    assert envelope.tablet_incarnation == 1 and envelope.quiet
    assert raw == envelope.SerializeToString()  # what protobuf would write


NUMBERS = st.integers(0, 127) | st.integers(0, 1 << 22) | st.integers(0, (1 << 64) - 1)
OPIDS = st.builds(OpId, NUMBERS, NUMBERS)
ENTRIES = st.builds(Entry, NUMBERS, NUMBERS, st.sampled_from(EntryKind), NUMBERS, st.binary(max_size=300))
UPDATES = st.builds(
    UpdateRequest,
    NUMBERS,
    OPIDS,
    st.lists(ENTRIES, max_size=3).map(tuple),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.integers(0, (1 << 32) - 1),
    NUMBERS,
)
BOOLEANS = st.booleans()
RESPONSES = st.builds(
    UpdateResponse,
    NUMBERS,
    BOOLEANS,
    OPIDS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    BOOLEANS,
    BOOLEANS,
    NUMBERS,
    NUMBERS,
)


@given(UPDATES | RESPONSES)
def test_any_update_and_its_answer_are_what_protobuf_would_write(message: Message) -> None:
    raw = encode_body(message)
    envelope = ConsensusMessage.FromString(raw)
    assert message_from_pb(envelope) == message
    assert raw == envelope.SerializeToString()


def test_an_unknown_body_is_refused() -> None:
    with pytest.raises(Rejected) as refused:
        message_from_pb(ConsensusMessage(from_replica=1))
    assert refused.value.code is Code.UNSUPPORTED_VERSION


def test_numbers_of_a_later_program_are_refused_by_name() -> None:
    envelope = ConsensusMessage(from_replica=1, to_replica=2)
    envelope.update.entries.add(term=1, index=2, kind=5)
    with pytest.raises(Rejected, match=r"entry 1\.2: kind 5 is unknown.*upgrade") as refused:
        message_from_pb(envelope)
    assert refused.value.code is Code.UNSUPPORTED_VERSION
    peer = common_pb2.PeerPB(replica_id=3)
    peer.member_type = 9  # type: ignore[assignment]
    with pytest.raises(Rejected, match=r"peer 3: member type 9 is unknown.*upgrade") as refused:
        peer_from_pb(peer)
    assert refused.value.code is Code.UNSUPPORTED_VERSION


def test_the_cause_that_a_peer_tells_is_bounded() -> None:
    """A node logs it, and keeps it while it stands for election."""
    envelope = ConsensusMessage()
    envelope.timeout_now.CopyFrom(TimeoutNowPB(term=9, cause="x" * 100_000))
    told = message_from_pb(envelope)
    assert isinstance(told, TimeoutNow) and told.cause.endswith("...")
    assert len(told.cause) == TEXT_CHARS_MAX
    assert len(encode_body(TimeoutNow(9, "x" * 100_000))) < 2 * TEXT_CHARS_MAX

"""Raft messages to protobuf and back. Called for every message between nodes, so written out plainly.

An encoded envelope is its fields one after the other: `encode_head`, which is the same for each message to a peer, then
`encode_body`, which is the same for each peer that gets the message.

Invariant: `message_from_pb` of both is the message, and both are exactly what protobuf would write.
"""

from __future__ import annotations

from functools import lru_cache
from typing import assert_never

from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.rpc.convert import entry_from_pb, id_from_pb, id_to_pb, opid_from_pb
from stele.rpc.frames import tag, varint
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2 import (
    ConsensusMessage,
    EntryPB,
    UpdateConsensusRequest,
    UpdateConsensusResponse,
)

QUIET = ConsensusMessage(quiet=True).SerializeToString()
"""Behind head and body it marks the message so."""


@lru_cache(16_384)
def encode_head(tablet_id: bytes, sender: ReplicaId, to: ReplicaId, incarnation: int) -> bytes:
    """The fields of an envelope that say whose message it is."""
    return ConsensusMessage(
        tablet_id=tablet_id, from_replica=sender, to_replica=to, tablet_incarnation=incarnation
    ).SerializeToString()


def encode_body(message: Message) -> bytes:
    """The field of an envelope that is the message."""
    match message:
        case UpdateRequest():
            return _update(message)
        case UpdateResponse():
            return _update_response(message)
        case _:
            return _of_elections(message)


# What makes up nearly all messages is put together from bytes: to make and fill protobuf's objects takes twice as long where
# they are not in the processor's caches, as they never are between one message and the next.


def _update(message: UpdateRequest) -> bytes:
    parts = [b"", _uint(_UPDATE_TERM, message.term), _opid(_UPDATE_PRECEDING, message.preceding)]
    for entry in message.entries:
        payload = entry.payload
        head = (
            _uint(_ENTRY_TERM, entry.term) + _uint(_ENTRY_INDEX, entry.index) + _uint(_ENTRY_KIND, entry.kind)
        )
        if entry.timestamp:
            head += _ENTRY_TIMESTAMP + entry.timestamp.to_bytes(8, "little")
        if payload:
            head += _ENTRY_PAYLOAD + varint(len(payload))
        parts.append(_UPDATE_ENTRY + varint(len(head) + len(payload)) + head)
        parts.append(payload)
    parts.append(_uint(_UPDATE_COMMIT_INDEX, message.commit_index))
    parts.append(_uint(_UPDATE_READ_CONTEXT, message.read_context))
    parts.append(_uint(_UPDATE_SENT_MS, message.sent_ms))
    parts.append(_uint(_UPDATE_ALL_REPLICATED, message.all_replicated_index))
    parts[0] = _UPDATE + varint(sum(map(len, parts)))
    return b"".join(parts)


def _update_response(message: UpdateResponse) -> bytes:
    body = _uint(_RESPONSE_TERM, message.term)
    if message.success:
        body += _RESPONSE_SUCCESS
    body += _opid(_RESPONSE_LAST_RECEIVED, message.last_received)
    if message.conflict_index or message.conflict_term:
        body += _uint(_RESPONSE_CONFLICT_INDEX, message.conflict_index)
        body += _uint(_RESPONSE_CONFLICT_TERM, message.conflict_term)
    if message.read_context:
        body += _uint(_RESPONSE_READ_CONTEXT, message.read_context)
    body += _uint(_RESPONSE_SENT_MS, message.sent_ms)
    if message.has_data:
        body += _RESPONSE_HAS_DATA
    if message.failed:
        body += _RESPONSE_FAILED
    body += _uint(_RESPONSE_PRECEDING_INDEX, message.preceding_index)
    return _RESPONSE + varint(len(body)) + body


def _uint(field: bytes, value: int) -> bytes:
    return field + varint(value) if value else b""


def _opid(field: bytes, opid: OpId) -> bytes:
    body = _uint(_OPID_TERM, opid.term) + _uint(_OPID_INDEX, opid.index)
    return field + varint(len(body)) + body


_UPDATE = tag(ConsensusMessage, "update")
_UPDATE_TERM = tag(UpdateConsensusRequest, "term")
_UPDATE_PRECEDING = tag(UpdateConsensusRequest, "preceding")
_UPDATE_ENTRY = tag(UpdateConsensusRequest, "entries")
_UPDATE_COMMIT_INDEX = tag(UpdateConsensusRequest, "commit_index")
_UPDATE_READ_CONTEXT = tag(UpdateConsensusRequest, "read_context")
_UPDATE_SENT_MS = tag(UpdateConsensusRequest, "sent_ms")
_UPDATE_ALL_REPLICATED = tag(UpdateConsensusRequest, "all_replicated_index")
_ENTRY_TERM = tag(EntryPB, "term")
_ENTRY_INDEX = tag(EntryPB, "index")
_ENTRY_KIND = tag(EntryPB, "kind")
_ENTRY_TIMESTAMP = tag(EntryPB, "timestamp")
_ENTRY_PAYLOAD = tag(EntryPB, "payload")
_RESPONSE = tag(ConsensusMessage, "update_response")
_RESPONSE_TERM = tag(UpdateConsensusResponse, "term")
_RESPONSE_SUCCESS = tag(UpdateConsensusResponse, "success") + b"\x01"
_RESPONSE_LAST_RECEIVED = tag(UpdateConsensusResponse, "last_received")
_RESPONSE_CONFLICT_INDEX = tag(UpdateConsensusResponse, "conflict_index")
_RESPONSE_CONFLICT_TERM = tag(UpdateConsensusResponse, "conflict_term")
_RESPONSE_READ_CONTEXT = tag(UpdateConsensusResponse, "read_context")
_RESPONSE_SENT_MS = tag(UpdateConsensusResponse, "sent_ms")
_RESPONSE_HAS_DATA = tag(UpdateConsensusResponse, "has_data") + b"\x01"
_RESPONSE_FAILED = tag(UpdateConsensusResponse, "failed") + b"\x01"
_RESPONSE_PRECEDING_INDEX = tag(UpdateConsensusResponse, "preceding_index")
_OPID_TERM = tag(common_pb2.OpIdPB, "term")
_OPID_INDEX = tag(common_pb2.OpIdPB, "index")


def _of_elections(message: VoteRequest | VoteResponse | TimeoutNow) -> bytes:
    envelope = ConsensusMessage()
    match message:
        case VoteRequest():
            envelope.vote.CopyFrom(
                consensus_pb2.VoteRequest(
                    term=message.term,
                    last_logged=common_pb2.OpIdPB(
                        term=message.last_logged.term, index=message.last_logged.index
                    ),
                    pre_vote=message.pre_vote,
                    ignore_live_leader=message.ignore_live_leader,
                    candidate_node=id_to_pb(message.candidate_node),
                )
            )
        case VoteResponse():
            envelope.vote_response.CopyFrom(
                consensus_pb2.VoteResponse(
                    term=message.term,
                    granted=message.granted,
                    pre_vote=message.pre_vote,
                    request_term=message.request_term,
                    leader_failed=message.leader_failed,
                    failed=message.failed,
                )
            )
        case TimeoutNow():
            envelope.timeout_now.CopyFrom(consensus_pb2.TimeoutNow(term=message.term))
        case _:
            assert_never(message)
    return envelope.SerializeToString()


def message_from_pb(envelope: ConsensusMessage) -> Message:
    """The message in an envelope.

    Raises:
        Rejected: UNSUPPORTED_VERSION for a body or an entry kind that this program does not know.
    """
    match envelope.WhichOneof("body"):
        case "update":
            u = envelope.update
            opid = u.preceding
            return UpdateRequest(
                u.term,
                OpId(opid.term, opid.index),
                tuple([entry_from_pb(e) for e in u.entries]),
                u.commit_index,
                u.read_context,
                u.sent_ms,
                u.all_replicated_index,
            )
        case "update_response":
            r = envelope.update_response
            opid = r.last_received
            return UpdateResponse(
                r.term,
                r.success,
                OpId(opid.term, opid.index),
                r.conflict_index,
                r.conflict_term,
                r.read_context,
                r.sent_ms,
                r.has_data,
                r.failed,
                r.preceding_index,
            )
        case "vote":
            v = envelope.vote
            return VoteRequest(
                v.term,
                opid_from_pb(v.last_logged),
                v.pre_vote,
                v.ignore_live_leader,
                NodeId(id_from_pb(v.candidate_node)),
            )
        case "vote_response":
            w = envelope.vote_response
            return VoteResponse(w.term, w.granted, w.pre_vote, w.request_term, w.leader_failed, w.failed)
        case "timeout_now":
            return TimeoutNow(envelope.timeout_now.term)
        case other:
            raise Rejected(
                f"a peer sent a message of kind {other}, unknown to this program; upgrade it",
                code=Code.UNSUPPORTED_VERSION,
            )

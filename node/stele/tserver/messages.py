"""Converts Raft messages to protobuf and back. It runs for every message between nodes, so it is written out
field by field for speed.

An encoded envelope is the concatenation of two parts. `encode_head` is the same for all messages to a peer;
`encode_body` is the same for all peers that get a message.

Invariant: `message_from_pb` of both parts gives the message, and both parts are exactly what protobuf would
write.
"""

from __future__ import annotations

from functools import lru_cache
from typing import assert_never

from stele.model.bounds import cut
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.rpc.convert import entry_from_pb, id_from_pb, id_to_pb, opid_from_pb
from stele.rpc.proto import common_pb2, consensus_pb2

QUIET = consensus_pb2.ConsensusMessage(quiet=True).SerializeToString()
"""Marks a message as quiet. It is appended to head and body."""


@lru_cache(16_384)
def encode_head(tablet_id: bytes, sender: ReplicaId, to: ReplicaId, incarnation: int) -> bytes:
    """The fields of an envelope that identify sender, receiver and tablet."""
    return consensus_pb2.ConsensusMessage(
        tablet_id=tablet_id, from_replica=sender, to_replica=to, tablet_incarnation=incarnation
    ).SerializeToString()


def encode_body(message: Message) -> bytes:
    """The field of an envelope that holds the message. Set field by field: protobuf copies a submessage that
    is assigned."""
    envelope = consensus_pb2.ConsensusMessage()
    match message:
        case UpdateRequest():
            update = envelope.update
            update.term = message.term
            preceding = update.preceding
            preceding.term = message.preceding.term
            preceding.index = message.preceding.index
            update.commit_index = message.commit_index
            if message.read_context:
                update.read_context = message.read_context
            update.sent_ms = message.sent_ms
            update.all_replicated_index = message.all_replicated_index
            if message.lease_ms:
                update.lease_ms = message.lease_ms
            if message.lease_sent_ms:
                update.lease_sent_ms = message.lease_sent_ms
            if message.early:
                update.early = True
            for entry in message.entries:
                update.entries.add(
                    term=entry.term,
                    index=entry.index,
                    kind=entry.kind,
                    timestamp=entry.timestamp,
                    payload=entry.payload,
                )
        case UpdateResponse():
            response = envelope.update_response
            response.term = message.term
            last_received = response.last_received
            last_received.term = message.last_received.term
            last_received.index = message.last_received.index
            response.sent_ms = message.sent_ms
            response.has_data = message.has_data
            response.preceding_index = message.preceding_index
            response.success = message.success
            if message.conflict_index:
                response.conflict_index = message.conflict_index
            if message.conflict_term:
                response.conflict_term = message.conflict_term
            if message.read_context:
                response.read_context = message.read_context
            if message.failed:
                response.failed = True
            if message.lease_sent_ms:
                response.lease_sent_ms = message.lease_sent_ms
            if message.written_index:
                response.written_index = message.written_index
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
                    released=message.released,
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
            asks = consensus_pb2.TimeoutNow(
                term=message.term, cause=cut(message.cause), lease_given_up=message.lease_given_up
            )
            envelope.timeout_now.CopyFrom(asks)
        case _:
            assert_never(message)
    return envelope.SerializeToString()


def message_from_pb(envelope: consensus_pb2.ConsensusMessage) -> Message:
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
                u.lease_ms,
                u.lease_sent_ms,
                u.early,
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
                r.lease_sent_ms,
                r.written_index,
            )
        case "vote":
            v = envelope.vote
            return VoteRequest(
                v.term,
                opid_from_pb(v.last_logged),
                v.pre_vote,
                v.ignore_live_leader,
                NodeId(id_from_pb(v.candidate_node)),
                v.released,
            )
        case "vote_response":
            w = envelope.vote_response
            return VoteResponse(w.term, w.granted, w.pre_vote, w.request_term, w.leader_failed, w.failed)
        case "timeout_now":
            t = envelope.timeout_now
            return TimeoutNow(t.term, cut(t.cause), t.lease_given_up)
        case _:
            kind: str | None = envelope.WhichOneof("body")
            raise Rejected(
                f"a peer sent a message of kind {kind}, unknown to this program; upgrade it",
                code=Code.UNSUPPORTED_VERSION,
            )

"""Converts messages to values and back. Only here identifiers become 16 raw bytes and configurations become
protobuf.

Called by every servicer and client. Knows nothing of gRPC. Invariant: `x_from_pb(x_to_pb(x)) == x`. An
invalid value from a peer is a `Rejected`, never another exception.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from sys import intern
from typing import Any

from stele.model.config import Configuration, Peer, member_type_of
from stele.model.entry import Entry, entry_kind_of
from stele.model.errors import Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.rpc.proto import common_pb2, consensus_pb2


def id_to_pb(text: str) -> bytes:
    """16 raw bytes of an identifier. The empty text (no identifier) stays empty.

    Raises:
        Rejected: INVALID_ARGUMENT if `text` is not 32 hex digits.
    """
    if not text:
        return b""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise Rejected(f"identifier {text!r}: expected 32 hex digits")
    return raw


def id_from_pb(raw: bytes) -> str:
    """32 hex digits of an identifier; "" if there is none.

    Raises:
        Rejected: INVALID_ARGUMENT: `raw` is neither empty nor 16 bytes.
    """
    if raw and len(raw) != 16:
        raise Rejected(f"received an identifier of {len(raw)} bytes; expected 16")
    return raw.hex()


def opid_to_pb(opid: OpId) -> common_pb2.OpIdPB:
    """(term, index) as a message."""
    return common_pb2.OpIdPB(term=opid.term, index=opid.index)


def opid_from_pb(pb: common_pb2.OpIdPB) -> OpId:
    """(term, index) of a message. If unset: OPID_NONE."""
    return OpId(pb.term, pb.index) if pb.term or pb.index else OPID_NONE


def peer_to_pb(peer: Peer) -> common_pb2.PeerPB:
    """A member of a configuration as a message."""
    return common_pb2.PeerPB(
        node_id=id_to_pb(peer.node_id),
        replica_id=peer.replica_id,
        address=peer.address,
        member_type=common_pb2.MemberTypePB.ValueType(int(peer.member_type)),
        promote=peer.promote,
        witness_start=opid_to_pb(peer.witness_start),
    )


def peer_from_pb(pb: common_pb2.PeerPB) -> Peer:
    """A member of a configuration.

    Raises:
        Rejected: this program does not know the member type, or an identifier is invalid.
    """
    # Thousands of configurations name the same nodes, so each name is kept once.
    return Peer(
        NodeId(intern(id_from_pb(pb.node_id))),
        ReplicaId(pb.replica_id),
        intern(pb.address),
        member_type_of(pb.member_type, f"peer {pb.replica_id}"),
        pb.promote,
        opid_from_pb(pb.witness_start),
    )


def config_to_pb(config: Configuration) -> common_pb2.ConfigurationPB:
    """A configuration as a message."""
    return common_pb2.ConfigurationPB(
        opid_index=config.opid_index,
        peers=[peer_to_pb(peer) for peer in config.peers],
        incarnation=config.incarnation,
    )


def config_from_pb(pb: common_pb2.ConfigurationPB) -> Configuration:
    """A configuration. Raises `Rejected`; see `peer_from_pb`."""
    return Configuration(pb.opid_index, tuple(peer_from_pb(peer) for peer in pb.peers), pb.incarnation)


def entry_from_pb(pb: consensus_pb2.EntryPB) -> Entry:
    """A log entry.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the entry's kind.
    """
    term, index = pb.term, pb.index
    return Entry(term, index, entry_kind_of(pb.kind, term, index), pb.timestamp, pb.payload)


def whole_records(form: struct.Struct, data: bytes) -> Iterator[tuple[Any, ...]]:
    """The records in `data`. Bytes at the end that are no whole record are ignored."""
    return form.iter_unpack(data[: len(data) // form.size * form.size])

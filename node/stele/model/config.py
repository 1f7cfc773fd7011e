"""Raft configurations: who the peers of a tablet are. Imports only ids and errors.

Invariant: a configuration is an immutable value. No node and no replica_id is in it twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from sys import intern

from stele.model.errors import Code, Corrupt, Rejected, unknown_here
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.model.jsons import parse_json


class MemberType(IntEnum):
    """How a peer takes part. The numbers are on disk and on the wire."""

    VOTER = 1
    NON_VOTER = 2
    WITNESS = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a configuration.

    `address` is a hint (host:port of the node's gRPC server). `promote` is set on a NON_VOTER that the leader
    will make a voter once it has caught up (a PRE_FOLLOWER). `witness_start` is the committed OpId after
    which a WITNESS begins its log.
    """

    node_id: NodeId
    replica_id: ReplicaId
    address: str
    member_type: MemberType = MemberType.VOTER
    promote: bool = False
    witness_start: OpId = OPID_NONE

    @property
    def votes(self) -> bool:
        """Whether this peer counts in elections and commits."""
        return self.member_type is not MemberType.NON_VOTER


@dataclass(frozen=True, slots=True)
class Configuration:
    """The set of peers of a tablet; `opid_index` is the log index that wrote it, -1 for the first.

    `incarnation`: the tablet's. Only a recovery after a lost majority raises it. Log indexes after a recovery
    may repeat those of the lost replicas, so compare configurations by `version`.
    """

    opid_index: int
    peers: tuple[Peer, ...]
    incarnation: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """(incarnation, opid_index): of two committed configurations of a tablet, the newer has the higher one."""
        return self.incarnation, self.opid_index

    def peer(self, replica_id: int) -> Peer | None:
        """The peer with this replica_id, or None."""
        for peer in self.peers:
            if peer.replica_id == replica_id:
                return peer
        return None

    def peer_on(self, node_id: str) -> Peer | None:
        """The peer on this node, or None."""
        for peer in self.peers:
            if peer.node_id == node_id:
                return peer
        return None

    def names(self, replica_id: int, node_id: str) -> bool:
        """Whether this replica on this node is a peer."""
        peer = self.peer(replica_id)
        return peer is not None and peer.node_id == node_id

    @property
    def voters(self) -> tuple[Peer, ...]:
        """Peers that vote: VOTER and WITNESS."""
        return tuple(p for p in self.peers if p.votes)

    @property
    def majority(self) -> int:
        """The number of voters that make a majority."""
        return len(self.voters) // 2 + 1


def member_type_of(number: int, whose: str) -> MemberType:
    """The member type for a number from a disk or the wire.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the number.
    """
    try:
        return MemberType(number)
    except ValueError:
        raise unknown_here(f"{whose}: member type", number) from None


_FIRST, _RECOVERED = 1, 2
"""Versions of the bytes. The first is for tablets that were never recovered, and every release reads it. The
second adds the incarnation after the peers."""


def encode_configuration(config: Configuration) -> bytes:
    """The bytes of a configuration, for CONFIG and NOOP entries and the consensus metadata.

    A version byte, then compact JSON with keys in a fixed order, so equal values have equal bytes.
    """
    peers = [
        [
            p.node_id,
            p.replica_id,
            p.address,
            int(p.member_type),
            int(p.promote),
            p.witness_start.term,
            p.witness_start.index,
        ]
        for p in config.peers
    ]
    values: list[object] = [config.opid_index, peers]
    if config.incarnation:
        values.append(config.incarnation)
    body = json.dumps(values, separators=(",", ":"), ensure_ascii=True)
    return bytes([_RECOVERED if config.incarnation else _FIRST]) + body.encode()


def decode_configuration(data: bytes) -> Configuration:
    """The inverse of `encode_configuration`.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the version or a member type.
        Corrupt: the bytes are not a configuration.
    """
    if not data:
        raise Corrupt("configuration: it is empty; expected a version byte and a body")
    if data[0] not in (_FIRST, _RECOVERED):
        raise Rejected(
            f"configuration: version {data[0]} is unknown; this program reads {_FIRST} and {_RECOVERED}; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    try:
        opid_index, raw, *rest = parse_json(data[1:])
        (incarnation,) = rest if data[0] == _RECOVERED else (0, *rest)
        peers = tuple(
            Peer(
                NodeId(intern(node_id)),  # thousands of configurations name the same nodes
                ReplicaId(int(replica_id)),
                intern(str(address)),
                member_type_of(member_type, f"peer {replica_id}"),
                bool(promote),
                OpId(int(start_term), int(start_index)) if start_term or start_index else OPID_NONE,
            )
            for node_id, replica_id, address, member_type, promote, start_term, start_index in raw
        )
        return Configuration(int(opid_index), peers, int(incarnation))
    except (ValueError, TypeError) as exc:
        raise Corrupt(f"configuration: {exc}; the bytes are damaged") from exc

"""Configurations: their bytes, and which of two is the newer."""

from __future__ import annotations

import pytest

from stele.model.config import (
    Configuration,
    MemberType,
    Peer,
    decode_configuration,
    encode_configuration,
)
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import config_from_pb, config_to_pb

PEERS = (Peer(NodeId("a" * 32), ReplicaId(1), "h:1"),)
FIRST_RELEASE = b'\x01[7,[["' + b"a" * 32 + b'",1,"h:1",1,0,0,0]]]'


def test_what_was_never_recovered_is_written_as_the_first_release_reads_it() -> None:
    assert encode_configuration(Configuration(7, PEERS)) == FIRST_RELEASE
    assert decode_configuration(FIRST_RELEASE) == Configuration(7, PEERS, 0)


def test_the_incarnation_stands_in_the_bytes_and_on_the_wire() -> None:
    config = Configuration(7, PEERS, 3)
    raw = encode_configuration(config)
    assert raw[0] == 2, "an earlier release refuses it as of a later version, not as damaged"
    assert decode_configuration(raw) == config == config_from_pb(config_to_pb(config))
    with pytest.raises(Corrupt):
        decode_configuration(b"\x02" + FIRST_RELEASE[1:])
    with pytest.raises(Corrupt):
        decode_configuration(b"\x01" + raw[1:])
    with pytest.raises(Rejected) as later:
        decode_configuration(b"\x03" + raw[1:])
    assert later.value.code is Code.UNSUPPORTED_VERSION


def test_a_recovered_configuration_is_newer_whatever_its_index() -> None:
    assert (
        Configuration(7, PEERS, 1).version
        > Configuration(900, PEERS).version
        > Configuration(7, PEERS).version
    )


@pytest.mark.parametrize(("voters", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (7, 4)])
def test_two_majorities_have_a_voter_in_common_and_a_witness_is_a_voter(voters: int, majority: int) -> None:
    peers = [Peer(NodeId(f"{n:032x}"), ReplicaId(n), "") for n in range(voters)]
    peers[0] = Peer(NodeId("0" * 32), ReplicaId(0), "", MemberType.WITNESS)
    learner = Peer(NodeId("f" * 32), ReplicaId(9), "", MemberType.NON_VOTER)
    config = Configuration(7, (*peers, learner))
    assert config.majority == majority and 2 * config.majority > len(config.voters) == voters


def test_a_replica_is_named_only_on_its_node() -> None:
    config = Configuration(7, PEERS)
    assert config.names(1, "a" * 32)
    assert not config.names(1, "b" * 32) and not config.names(2, "a" * 32)

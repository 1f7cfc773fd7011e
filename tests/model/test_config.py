"""Configurations: their bytes, and which of two is the newer."""

from __future__ import annotations

import pytest

from stele.model.config import Configuration, Peer, decode_configuration, encode_configuration
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

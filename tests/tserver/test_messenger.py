"""What the messenger of a node drops: counted each time, and told once per cause, peer and minute."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from stele import metrics
from stele.model.bounds import TERM_MAX
from stele.model.ids import NodeId, new_id
from stele.rpc.channels import ChannelPool
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.convert import id_to_pb
from stele.rpc.frames import frame
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import SCHEMA, LocalCluster

NODES = 1
EACH = 500


class Peer:
    """A node that nobody knows, with a stream of its own to the node under test, and a replica there."""

    def __init__(self, cluster: LocalCluster, replica_id: int) -> None:
        self._cluster = cluster
        self.replica_id = replica_id
        self.node_id = NodeId(new_id())

    async def open(self) -> FramedConnection:
        node = self._cluster.running["node-0"]
        identity = Identity(self._cluster.cluster_id, self.node_id, 1)
        pool = ChannelPool(identity)
        hello = identity.hello(node.options.node_id, channel="control", address="127.0.0.1:9")
        request = common_pb2.OpenStreamRequest(hello=hello)
        opened = await pool.unary(
            node.options.listen, ConsensusServiceStub, "OpenPeerStream", request, timeout_s=WAIT_S
        )
        await pool.close()
        return await connect(node.options.listen, opened.port, opened.key)


def _dropped(logs: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "message dropped"]


async def test_what_is_dropped_is_told_once_per_cause_peer_and_minute(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 bad messages were 10,001 lines."""
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, replication_factor=1)
    node = cluster.running["node-0"]
    (replica,) = node.replicas
    now = 1_000.0
    monkeypatch.setattr(node.messenger._once, "_clock", lambda: now)

    def of(peer: Peer, **body: Any) -> consensus_pb2.ConsensusMessage:
        superblock = replica.superblock
        return consensus_pb2.ConsensusMessage(
            tablet_id=id_to_pb(superblock.tablet_id),
            from_replica=peer.replica_id,
            to_replica=superblock.replica_id,
            tablet_incarnation=superblock.tablet_incarnation,
            **body,
        )

    high = consensus_pb2.VoteRequest(term=TERM_MAX + 1, candidate_node=bytes(16))
    bodies: dict[str, dict[str, Any]] = {"kind": {}, "term": {"vote": high}}
    counted = {cause: metrics.peer_refused.labels(cause) for cause in bodies}
    before = {cause: counter._value.get() for cause, counter in counted.items()}
    peers = [Peer(cluster, 98), Peer(cluster, 99)]
    streams = [await peer.open() for peer in peers]

    async def flood() -> None:
        for peer, stream in zip(peers, streams, strict=True):
            for body in bodies.values():
                raw = consensus_pb2.PeerFrame(messages=[of(peer, **body)] * 50).SerializeToString()
                for _ in range(EACH // 50):
                    stream.send(frame(raw))
                    await asyncio.sleep(0)

    def arrived(times: int) -> bool:
        each = {cause: counter._value.get() - before[cause] for cause, counter in counted.items()}
        return all(count == times * EACH * len(peers) for count in each.values())

    with capture_logs() as logs:
        await flood()
        await wait_until(lambda: arrived(1))
        told = _dropped(logs)
        assert {(line["from_node"], line["cause"]) for line in told} == {
            (peer.node_id, cause) for peer in peers for cause in bodies
        }
        assert len(told) == 4 and not any("left_out" in line for line in told)
        assert f"at most {TERM_MAX}" in next(line["error"] for line in told if line["cause"] == "term")

        now += 59
        await flood()
        await wait_until(lambda: arrived(2))
        assert len(_dropped(logs)) == 4, "the minute is not over"

        now += 2
        await flood()
        await wait_until(lambda: arrived(3))
        later = _dropped(logs)[4:]
        assert len(later) == 4
        assert [line["left_out"] for line in later] == [2 * EACH - 1] * 4
    for stream in streams:
        stream.close()
    assert replica.running

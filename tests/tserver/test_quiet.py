"""What other nodes ask about groups at rest takes little time of the loop, whatever they ask."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import structlog

from stele.model.ids import NodeId, ReplicaId, StreamKey, TabletId
from stele.raft.options import RaftOptions
from stele.rpc.proto import consensus_pb2
from stele.tserver.quiet import _ASKED_MAX, _GROUP, _SLICE, QuietGroups
from stele.tserver.replicas import Replicas

PEER, OTHER = NodeId("a" * 32), NodeId("b" * 32)


def replica_of(number: int) -> Any:
    tablet_id = TabletId(f"{number:032x}")
    runtime = SimpleNamespace(quiet=True)
    runtime.wake = lambda: setattr(runtime, "quiet", False)
    config = SimpleNamespace(peers=[SimpleNamespace(node_id=PEER)])
    return SimpleNamespace(
        tablet_id=tablet_id,
        term=1,
        superblock=SimpleNamespace(key=StreamKey(tablet_id, ReplicaId(1))),
        runtime=runtime,
        running=True,
        config=config,
        host=SimpleNamespace(node_id=NodeId("c" * 32)),
    )


class Node:
    """`count` groups that rest, and what is said of them."""

    def __init__(self, count: int) -> None:
        self.replicas = [replica_of(n) for n in range(count)]
        by_key = {r.superblock.key: r for r in self.replicas}
        self.said: list[tuple[NodeId, consensus_pb2.RestingPB]] = []
        self.groups = QuietGroups(
            cast(Replicas, SimpleNamespace(by_key=by_key.get)),
            RaftOptions(),
            lambda node_id, resting: self.said.append((node_id, resting)),
            0,
        )
        for replica in self.replicas:
            self.groups._rests(replica)
        self.groups._ping_due_ms = self.groups._look_due_ms = 1 << 60

    def answers(self) -> list[bytes]:
        """What a peer is told, tick by tick, until there is no more to say."""
        while self.groups._said:
            self.groups.tick(1)
        return [resting.awake for _, resting in self.said]


def asked(count: int, start: int = 0) -> bytes:
    return b"".join(_GROUP.pack(bytes.fromhex(f"{n:032x}"), 1) for n in range(start, start + count))


def test_a_question_is_answered_a_slice_with_each_tick() -> None:
    node = Node(5_000)
    node.groups.told(PEER, consensus_pb2.RestingPB(asks=asked(6_000)))
    assert not node.said
    assert b"".join(node.answers()) == asked(1_000, 5_000)
    node.said.clear()
    node.groups.told(OTHER, consensus_pb2.RestingPB(asks=asked(10)))  # it has no replica of these groups
    assert node.answers() == [asked(10)]
    node.groups.told(PEER, consensus_pb2.RestingPB(awake=asked(3_000)))
    node.answers()
    assert [r.runtime.quiet for r in node.replicas] == [False] * 3_000 + [True] * 2_000
    assert node.groups.resting == len(node.groups._by_group) == 2_000


def test_a_question_of_many_megabytes_is_dropped_and_told_once() -> None:
    """One of 14 MB held the loop for 2.3 s, with all tablets of its node."""
    node = Node(10)
    long = consensus_pb2.RestingPB(asks=bytes(14 << 20))
    with structlog.testing.capture_logs() as logs:
        began_s = time.process_time()
        for _ in range(10):
            node.groups.told(PEER, long)
        assert time.process_time() - began_s < 1.0
    assert [entry["event"] for entry in logs] == [
        "dropped a node's message about groups at rest: it is too long"
    ]
    assert not node.groups._said and not node.answers()


def test_one_node_that_asks_without_end_holds_nobody_up() -> None:
    node = Node(10)
    for _ in range(1_000):
        node.groups.told(PEER, consensus_pb2.RestingPB(asks=asked(_SLICE, 100)))
    longest = consensus_pb2.RestingPB(awake=asked(_ASKED_MAX))
    node.groups.told(OTHER, longest)
    node.groups.tick(1)
    node.groups.tick(2)
    assert len(node.groups._said) < 80 and node.groups._said_by[OTHER] == _ASKED_MAX // _SLICE - 1
    node.answers()
    assert not node.groups._said_by

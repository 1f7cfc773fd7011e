"""Replicas that lack what the system does not give just now: they wait for it, and none is taken for damaged."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.errors import Retryable
from stele.model.ids import NodeId
from stele.tserver import replica_starter
from stele.tserver.process import exit_code
from tests.consensus import cluster
from tests.consensus.cluster import STEADY, Group, Network, TestNode, rows, table, wait_until

T = TypeVar("T")


class Descriptors:
    """What this process has of them; `take` leaves it none."""

    def __init__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._taken: list[int] = []

    def take(self) -> None:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, self._limits[1]))
        with pytest.raises(OSError) as none_left:
            while True:
                self._taken.append(os.dup(0))
        assert none_left.value.errno == errno.EMFILE

    def give(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        while self._taken:
            os.close(self._taken.pop())


@pytest.fixture
def descriptors() -> Iterator[Descriptors]:
    made = Descriptors()
    try:
        yield made
    finally:
        made.give()


class LackingNode(TestNode):
    """It has looked at what is on its volume, and then there are no descriptors."""

    def __init__(self, network: Network, directory: Path, node_id: NodeId, descriptors: Descriptors) -> None:
        super().__init__(network, directory, node_id)
        self._descriptors = descriptors
        self.before = False

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        scans = getattr(work, "__name__", "") == "_scan"
        if scans:
            # Its log makes a segment meanwhile, and gives descriptors back as it does.
            await wait_until(lambda: self.log.shared.wanted_sequence() is None)
        if scans and self.before:
            self._descriptors.take()
        found = await super().in_thread(work, *args)
        if scans and not self.before:
            self._descriptors.take()
        return found


async def started_without(descriptors: Descriptors, directory: Path) -> tuple[LackingNode, list[Group]]:
    """A node with three tablets that found no descriptor for any of them."""
    node = await TestNode(Network(), directory).start()
    groups = [await Group([node]).create() for _ in range(3)]
    for group in groups:
        await group.write(rows([1]))
        await group.replica(1).storage.flush()
    await node.stop()
    again = LackingNode(node.network, directory, node.node_id, descriptors)
    await again.start()
    for group in groups:
        group.nodes = [again]
    return again, groups


async def test_a_replica_that_finds_no_descriptor_waits_for_it(
    tmp_path: Path, descriptors: Descriptors
) -> None:
    """All of them were FAILED, and the driver copied them elsewhere."""
    node, groups = await started_without(descriptors, tmp_path / "n")
    try:
        assert node.replicas.opened
        states = {r.state for r in node.replicas}
        why = [r.error for r in node.replicas]
        descriptors.give()
        assert states == {ReplicaState.BOOTSTRAPPING}
        assert all("Too many open files" in error for error in why), why
        await wait_until(lambda: all(r.running for r in node.replicas))
        assert [table(await group.leader()) for group in groups] == [{1: "x1"}] * 3
        assert [r.error for r in node.replicas] == [""] * 3
    finally:
        descriptors.give()
        await node.stop()


async def test_a_replica_that_is_stopped_while_it_waits_does_not_start(
    tmp_path: Path, descriptors: Descriptors
) -> None:
    node, groups = await started_without(descriptors, tmp_path / "n")
    try:
        gone = groups[0].replica(1)
        assert node.manager.waiting_to_start == 3
        await gone.stop()
        descriptors.give()
        await wait_until(lambda: node.manager.waiting_to_start == 0)
        assert gone.state is ReplicaState.STOPPED and gone.machine is None and gone.core is None
        assert [g.replica(1).running for g in groups] == [False, True, True]
    finally:
        descriptors.give()
        await node.stop()


async def test_a_node_that_lacks_descriptors_for_long_ends(
    tmp_path: Path, descriptors: Descriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers heartbeats: its tablets would be short of a replica, and nobody would heal them."""
    monkeypatch.setattr(replica_starter, "LACKING_MS", 0)
    node, _ = await started_without(descriptors, tmp_path / "n")
    try:
        await wait_until(lambda: len(node.given_up) == 3)
        descriptors.give()
        assert all(isinstance(e, Retryable) and "Too many open files" in str(e) for e in node.given_up)
        assert {exit_code(error) for error in node.given_up} == {75}
        assert {r.state for r in node.replicas} == {ReplicaState.BOOTSTRAPPING}
    finally:
        descriptors.give()
        await node.stop()


async def test_a_node_that_cannot_look_at_its_volume_for_want_of_descriptors_ends(
    tmp_path: Path, descriptors: Descriptors
) -> None:
    node = await TestNode(Network(), tmp_path / "n").start()
    await Group([node]).create()
    await node.stop()
    again = LackingNode(node.network, tmp_path / "n", node.node_id, descriptors)
    again.before = True
    try:
        with pytest.raises(OSError) as none_left:
            await again.start()
        descriptors.give()
        assert none_left.value.errno == errno.EMFILE and exit_code(none_left.value) == 75
        assert not len(again.replicas)
    finally:
        descriptors.give()
        await again.stop()


class ForgettingNode(TestNode):
    """It lacks something each time it reads its log, until `lacks` is taken away."""

    lacks: Exception | None = None
    lacked = 0

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        if self.lacks is not None and getattr(work, "__name__", "") == "read_entries":
            self.lacked += 1
            raise self.lacks
        return await super().in_thread(work, *args)


@pytest.mark.parametrize(
    "lacks",
    [MemoryError("no memory just now"), RuntimeError("can't start new thread")],
    ids=["memory", "thread"],
)
async def test_a_leader_that_cannot_read_its_log_for_a_peer_just_now_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: Exception
) -> None:
    """It waited for ever for what it had read, and its peer, which answered and so seemed well, got no entry any more."""
    short = replace(STEADY, raft=replace(STEADY.raft, tail_bytes_max=20_000))
    monkeypatch.setattr(cluster, "OPTIONS", short)
    network = Network()
    nodes = [ForgettingNode(network, tmp_path / f"n{i}") for i in range(3)]
    for node in nodes:
        await node.start()
    try:
        group = await Group(list(nodes)).create()
        await group.write(rows([1]))
        leader = await group.leader()
        behind = next(r for r in group.replicas() if r is not leader)
        network.cut.add(behind.host.node_id)
        for at in range(20):
            await group.write(rows(range(100 * at, 100 * at + 100), "y" * 50))
        for node in nodes:
            node.lacks = lacks
        network.cut.clear()
        await wait_until(lambda: sum(node.lacked for node in nodes) > 0)
        for node in nodes:
            node.lacks = None
        await group.caught_up(behind)
        assert len(table(behind)) == 2_000
    finally:
        for node in nodes:
            await node.stop()


async def test_who_reads_a_log_without_the_memory_for_it_may_try_again(tmp_path: Path) -> None:
    node = ForgettingNode(Network(), tmp_path / "n")
    await node.start()
    try:
        group = await Group([node]).create()
        await group.write(rows([1]))
        leader = await group.leader()
        node.lacks = MemoryError()
        with pytest.raises(Retryable, match="reading the log: out of memory"):
            await leader.storage.read_log(1, 100)
        node.lacks = None
        assert await leader.storage.read_log(1, 100)
    finally:
        await node.stop()

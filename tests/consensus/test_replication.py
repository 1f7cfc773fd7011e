"""A group of three: writes, leader changes, restarts, reads. Real logs and stores, an in-memory network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.block import RowOp
from stele.model.clock import physical_us
from stele.model.config import MemberType, Peer
from stele.model.errors import Code, NotLeader, Rejected, Retryable
from stele.model.ids import ReplicaId
from stele.raft.effects import Role
from stele.raft.events import ChangeType
from stele.wal.cache import EntryCache
from stele.wal.files import File, OsFile, OsFiles
from tests.consensus import cluster
from tests.consensus.cluster import OPTIONS, Group, Network, TestNode, pairs, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


async def test_writes_reach_all(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    outcomes = await asyncio.gather(*(group.write(rows([i])) for i in range(50)))
    assert len({o.timestamp for o in outcomes}) == 50
    for replica in group.replicas():
        await group.caught_up(replica)
        assert table(replica) == {i: f"x{i}" for i in range(50)}


async def test_the_hinted_replica_leads_first(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    assert (await group.leader()).replica_id == 1


async def test_followers_refuse_and_name_the_leader(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await wait_until(lambda: follower.leader == leader.replica_id)
    with pytest.raises(NotLeader) as refused:
        follower.submit(rows([1]))
    assert refused.value.leader_hint == leader.host.node_id


async def test_exactly_once_over_a_leader_change(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    client = os.urandom(16)
    first = await group.write(rows([1, 2], op=RowOp.INSERT, client=client, sequence=1))
    assert not first.row_errors
    leader = await group.leader()
    nodes[0].network.cut.add(leader.host.node_id)
    await wait_until(lambda: not leader.is_leader)
    again = await group.write(rows([1, 2], op=RowOp.INSERT, client=client, sequence=1))
    assert again.duplicate and not again.row_errors and again.timestamp == first.timestamp
    nodes[0].network.cut.clear()
    await group.caught_up(leader)
    assert table(leader) == {1: "x1", 2: "x2"}


async def test_a_minority_leader_answers_unknown_then_no_quorum(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    leader = await group.leader()
    await group.write(rows([1]))
    nodes[0].network.cut.update(n.node_id for n in nodes)
    with pytest.raises(Retryable) as waited:
        await leader.propose(rows([2]), deadline_ms=50)
    assert waited.value.code is Code.UNKNOWN_OUTCOME
    await wait_until(lambda: not leader.is_leader)
    await asyncio.sleep(OPTIONS.raft.election_max_ms * 1.5 / 1000)
    with pytest.raises(Retryable) as refused:
        leader.submit(rows([3]))
    assert refused.value.code is Code.NO_QUORUM
    nodes[0].network.cut.clear()
    await group.write(rows([4]))
    assert 4 in table(await group.leader())


async def test_a_write_whose_waiter_left_is_still_done(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    task = asyncio.create_task(leader.propose(rows([7])))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: table(leader) == {7: "x7"})


async def test_restart_of_everything_keeps_everything(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows(range(100)))
    await (await group.leader()).flush()
    await group.write(rows(range(100, 120)))
    term = (await group.leader()).term
    group.nodes = [await n.restart() for n in nodes]
    leader = await group.leader()
    assert leader.term > term
    await leader.linearizable_read()
    assert sorted(table(leader)) == list(range(120))
    await group.write(rows([200]))


async def test_a_new_leaders_snapshot_waits_for_what_earlier_ones_committed(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    for i in range(60):
        await group.write(rows(range(i * 50, i * 50 + 50)))
    group.nodes = [await n.restart() for n in nodes]
    while True:
        leaders = [r for r in group.replicas() if r.is_leader]
        if leaders:
            break
        await asyncio.sleep(0)
    snapshot = leaders[0].timestamps.now()
    await leaders[0].snapshot_ready(snapshot)
    assert len(table(leaders[0], snapshot)) == 3000


async def test_one_restarted_follower_needs_no_new_entry(group_of: MakeGroup) -> None:
    group, _nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(follower)
    assert leader.core is not None
    before = leader.core.status().last_logged
    node = group.node_of(follower)
    group.nodes[group.nodes.index(node)] = await node.restart()
    back = group.replica(follower.replica_id)
    await wait_until(lambda: back.state is ReplicaState.RUNNING)
    assert (await group.leader()) is leader
    assert back.core is not None
    assert leader.core.status().last_logged == back.core.status().last_logged == before


async def test_a_lossy_network_loses_no_write(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    nodes[0].network.loss = 0.1
    client = os.urandom(16)
    for i in range(40):
        outcome = await group.write(rows([i], op=RowOp.INSERT, client=client, sequence=i + 1))
        assert not outcome.row_errors
    nodes[0].network.loss = 0.0
    for replica in group.replicas():
        await group.caught_up(replica)
        assert sorted(table(replica)) == list(range(40))


async def test_leadership_is_handed_over(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    other = next(r for r in group.replicas() if r is not leader)
    await group.write(rows([1]))
    await leader.transfer_leadership(other.replica_id)
    await wait_until(lambda: other.is_leader)
    await group.write(rows([2]))
    assert table(await group.leader()) == {1: "x1", 2: "x2"}


async def test_snapshots_are_the_same_at_every_leader(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1], "old"))
    leader = await group.leader()
    snapshot = await leader.latest_snapshot()
    future = leader.timestamps.now() + (50_000 << 12)
    await leader.snapshot_ready(future)
    before = table(leader, future)
    await group.write(rows([1, 2], "new"))
    for target in group.replicas():
        leader = await group.leader()
        if target is not leader:
            await leader.transfer_leadership(target.replica_id)
        leader = await group.leader()
        await group.write(rows([3], f"by{target.replica_id}"))
        for at, expected in ((snapshot, {1: "old1"}), (future, before)):
            await leader.snapshot_ready(at)
            assert table(leader, at) == expected


async def test_what_is_acknowledged_after_a_hand_over_is_not_in_the_future(group_of: MakeGroup) -> None:
    """A new leader's first writes lay up to 250 ms ahead: scans of others, at the present, missed them."""
    group, _ = await group_of()
    await group.write(rows([1]))
    await (await group.leader()).transfer_leadership()
    outcome = await group.write(rows([2]))
    assert physical_us(outcome.timestamp) <= (await group.leader()).host.wall_us()


async def test_a_read_waits_no_longer_than_its_caller(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    nodes[0].network.cut.add(leader.host.node_id)
    reads = (leader.linearizable_read, leader.latest_snapshot)
    for read in reads:
        with pytest.raises(Retryable, match="within 50 ms") as late:
            await read(50)
        assert late.value.code is Code.TIMED_OUT


async def test_a_snapshot_far_ahead_is_refused(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    with pytest.raises(Rejected) as refused:
        await leader.snapshot_ready(leader.timestamps.now() + (10_000_000 << 12))
    assert refused.value.code is Code.CLOCK_AHEAD


async def test_timestamps_rise_though_the_new_leaders_clock_is_behind(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    nodes[1].skew_us = nodes[2].skew_us = -200_000
    first = await group.write(rows([1]))
    await (await group.leader()).transfer_leadership()
    second = await group.write(rows([1], "y"))
    assert second.timestamp > first.timestamp


async def test_after_a_leader_whose_clock_was_far_ahead_it_is_said_what_writes_wait_for(
    group_of: MakeGroup,
) -> None:
    """They hung, each for as long as its caller waited, and nobody was told why."""
    group, nodes = await group_of()
    for node in nodes:
        node.skew_us = 3_600_000_000
    await group.write(rows([1]))
    for node in nodes:
        node.skew_us = 0
    refused = ""
    while not refused:
        with contextlib.suppress(Retryable):
            await (await group.leader()).transfer_leadership()
        try:
            await group.led(lambda leader: leader.propose(rows([1]), deadline_ms=2_000))
        except Retryable as exc:
            if exc.code is Code.NOT_READY:
                refused = str(exc)
    assert any(f"clock of node {node.node_id}" in refused for node in nodes)
    await group.led(lambda leader: leader.latest_snapshot())
    for node in nodes:
        node.skew_us = 3_600_000_000
    await group.write(rows([2]))


async def test_a_follower_serves_a_snapshot_it_knows_to_be_complete(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    outcome = await group.write(rows([1]))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(follower)
    await follower.snapshot_ready(outcome.timestamp)
    assert table(follower, outcome.timestamp) == {1: "x1"}
    with pytest.raises(NotLeader):
        await follower.snapshot_ready(leader.timestamps.now() + (1_000 << 12))


async def test_a_quiet_tablet_writes_nothing(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    await asyncio.sleep(0.5)
    before = (await group.leader()).core.status().last_logged  # type: ignore[union-attr]
    await asyncio.sleep(0.6)
    assert (await group.leader()).core.status().last_logged == before  # type: ignore[union-attr]


async def test_too_large_and_disk_full_are_refused_before_the_log(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    with pytest.raises(Rejected) as large:
        leader.submit(bytes(OPTIONS.write_bytes_max + 1))
    assert large.value.code is Code.TOO_LARGE
    group.node_of(leader).low = True
    with pytest.raises(Retryable) as full:
        leader.submit(rows([1]))
    assert full.value.code is Code.DISK_FULL


class ScarceFiles(OsFiles):
    """A volume with 700 MiB free."""

    def free_bytes(self, directory: Path) -> int:
        return 700 << 20


async def test_a_group_whose_disks_are_all_nearly_full_elects_and_is_read(group_of: MakeGroup) -> None:
    """A node hands its leaders over when its disk fills: nobody could lead, where the first entry was refused."""
    group, nodes = await group_of(spare=1)
    await group.write(rows([1]))
    term = (await group.leader()).term
    for node in nodes:
        node.log.files = ScarceFiles()
        node.log.options = replace(node.log.options, low_space_bytes=1 << 30)
        node.log.refresh_space()
        node.low = node.log.low_space
        assert node.low
    with contextlib.suppress(Retryable):
        await (await group.leader()).transfer_leadership()
    await wait_until(lambda: any(r.is_leader and r.term > term for r in group.replicas()))
    await group.led(lambda leader: leader.linearizable_read())
    await group.led(lambda leader: leader.snapshot_ready(leader.timestamps.now()))
    assert table(await group.leader()) == {1: "x1"}
    with pytest.raises(Retryable) as full:
        await group.led(lambda leader: leader.propose(rows([2])))
    assert full.value.code is Code.DISK_FULL
    added = Peer(nodes[3].node_id, ReplicaId(4), "n4:1", MemberType.NON_VOTER)
    config = await group.led(
        lambda leader: leader.change_config(ChangeType.ADD, added, leader.committed_config.opid_index)
    )
    assert config.peer(ReplicaId(4)) == added


class StallingFile(OsFile):
    """Its syncs wait for `go`."""

    def __init__(self, fd: int, go: Event) -> None:
        super().__init__(fd)
        self._go = go

    def data_sync(self) -> None:
        self._go.wait()
        super().data_sync()

    def full_sync(self) -> None:
        self._go.wait()
        super().full_sync()


class StallingFiles(OsFiles):
    """A disk that stands still while `go` is cleared."""

    def __init__(self) -> None:
        self.go = Event()
        self.go.set()

    def create(self, path: Path) -> StallingFile:
        return StallingFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), self.go)

    def open(self, path: Path) -> StallingFile:
        return StallingFile(os.open(path, os.O_RDWR), self.go)


class SlowFile(OsFile):
    """Its syncs take some time more."""

    def data_sync(self) -> None:
        time.sleep(0.03)
        super().data_sync()


class SlowFiles(OsFiles):
    """A disk that is slow, and moves."""

    def create(self, path: Path) -> SlowFile:
        return SlowFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))

    def open(self, path: Path) -> SlowFile:
        return SlowFile(os.open(path, os.O_RDWR))


async def test_writes_proceed_where_commits_take_longer_than_clocks_may_be_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ceiling lay in the past when it was committed: nothing got a timestamp, ever."""
    monkeypatch.setattr(cluster, "OPTIONS", replace(OPTIONS, clock_error_max_ms=20))
    network = Network()
    nodes: list[TestNode] = []
    try:
        for number in range(3):
            node = TestNode(network, tmp_path / f"n{number}")
            node.files = SlowFiles()
            nodes.append(await node.start())
        group = await Group(nodes).create()
        for number in range(5):
            await group.write(rows([number]))
        leader = await group.leader()
        assert set(table(leader, await leader.latest_snapshot())) == set(range(5))
    finally:
        for node in nodes:
            await node.stop()


async def test_who_waits_for_its_disk_does_not_campaign_however_long_it_lasts(tmp_path: Path) -> None:
    """It campaigned again an election timeout after it was told, and raised its term again and again."""
    node = TestNode(Network(), tmp_path / "n")
    files = node.files = StallingFiles()
    await node.start()
    try:
        group = await Group([node]).create()
        leader = await group.leader()
        term = leader.term
        files.go.clear()
        leader.submit(rows([2]))
        await wait_until(lambda: leader.role is not Role.LEADER)
        await asyncio.sleep(8 * OPTIONS.raft.election_max_ms / 1000)
        assert leader.core is not None and leader.core.term == term
        files.go.set()
        await group.write(rows([3]))
    finally:
        files.go.set()
        await node.stop()


async def test_a_key_space_on_the_same_replica_code(group_of: MakeGroup) -> None:
    group, nodes = await group_of(kind="keyspace")
    await group.write(pairs(b"a", b"1"))
    group.nodes = [await n.restart() for n in nodes]
    leader = await group.leader()
    await leader.linearizable_read()
    assert leader.machine.read(b"a") == b"1"  # type: ignore[union-attr]


async def test_single_replica_group(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1)
    await group.write(rows([1]))
    group.nodes = [await nodes[0].restart()]
    await group.write(rows([2]))
    assert table(await group.leader()) == {1: "x1", 2: "x2"}


async def test_a_peer_whose_entries_were_just_collected_needs_a_copy(group_of: MakeGroup) -> None:
    """Its leader FAILED: it asked for entries that the log had let go, before anybody had told it so."""
    group, nodes = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
        assert replica.core is not None
        replica.core.log.tail_bytes_max = 1  # what a lagging peer lacks is read from the log
    lagging = next(r for r in group.replicas() if r is not leader)
    network = nodes[0].network
    network.cut.add(lagging.host.node_id)
    for number in range(30):
        await group.write(rows([number], "x" * 100_000))
    others = [r for r in group.replicas() if r is not lagging]
    for replica in others:
        await group.caught_up(replica)
        await replica.flush()
        replica.stream.release("peers")
        await group.node_of(replica).in_thread(group.node_of(replica).log.collect)
        assert replica.stream.start.index > lagging.applied_index
    for node in nodes:
        node.reports_due.clear()
    network.cut.clear()
    await wait_until(lambda: any(not r.running or lagging.replica_id in r.needs_copy for r in others))
    assert all(r.running for r in others), [r.error for r in others]
    leader = await group.leader()
    assert (
        leader.replica_id in group.node_of(leader).reports_due
    )  # no driver would hear of it, and nobody heal it
    await group.write(rows([1_000]))


class LackingFiles(OsFiles):
    """The next segments to be read find no descriptor."""

    def __init__(self) -> None:
        self.refusals = 0

    def open(self, path: Path) -> File:
        if self.refusals and path.name.startswith("segment-"):
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return super().open(path)


async def test_a_leader_that_finds_no_descriptor_for_its_log_reads_it_again(group_of: MakeGroup) -> None:
    """It waited for ever for what it had asked its log for, and its peer got nothing more."""
    group, nodes = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
        assert replica.core is not None
        replica.core.log.tail_bytes_max = 1  # what a lagging peer lacks is read from the log,
        group.node_of(replica).log.cache = EntryCache(0)  # and from its files
        group.node_of(replica).log.files = LackingFiles()
    lagging = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(lagging.host.node_id)
    for number in range(30):
        await group.write(rows([number], "x" * 100_000))
    others = [r for r in group.replicas() if r is not lagging]
    for replica in others:
        await group.caught_up(replica)
        group.node_of(replica).log.files.refusals = 2
    nodes[0].network.cut.clear()
    await group.caught_up(lagging)
    assert min(group.node_of(r).log.files.refusals for r in others) == 0
    assert all(r.running for r in others), [r.error for r in others]


async def test_a_peer_that_caught_up_after_all_is_told_to_need_no_copy(group_of: MakeGroup) -> None:
    """Its acknowledgement was late; the masters were told that it needs one, and a driver would replace it."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    node = group.node_of(leader)
    peer = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(peer)
    leader.needs_copy[peer.replica_id] = "it has nothing that matches"
    node.reports_due.clear()
    await wait_until(lambda: not leader.needs_copy)
    assert leader.replica_id in node.reports_due

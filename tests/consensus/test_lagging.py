"""Peers that lag: what they lack is read from the log, and who needs a copy is told, until it does not."""

from __future__ import annotations

import errno
from pathlib import Path

from stele.consensus.replica import Replica
from stele.wal.cache import EntryCache
from stele.wal.files import File, OsFiles
from tests.consensus.cluster import Group, rows, wait_until
from tests.consensus.conftest import MakeGroup


async def one_lags(group: Group) -> tuple[Replica, list[Replica]]:
    """Cut a follower off and write what it then lacks, which leaders have to read from the log; it, and the others."""
    await group.write(rows([1]))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
        assert replica.core is not None
        replica.core.log.tail_bytes_max = 1
    lagging = next(r for r in group.replicas() if r is not leader)
    group.nodes[0].network.cut.add(lagging.host.node_id)
    await group.fill_segments()
    others = [r for r in group.replicas() if r is not lagging]
    for replica in others:
        await group.caught_up(replica)
    return lagging, others


async def test_a_peer_whose_entries_were_just_collected_needs_a_copy(group_of: MakeGroup) -> None:
    """Its leader FAILED: it asked for entries that the log had let go, before anybody had told it so."""
    group, nodes = await group_of()
    lagging, others = await one_lags(group)
    for replica in others:
        await replica.storage.flush()
        replica.storage.stream.release("peers")
        await group.node_of(replica).in_thread(group.node_of(replica).log.collect)
        assert replica.storage.stream.start.index > lagging.applied_index
    for node in nodes:
        node.reports_due.clear()
    nodes[0].network.cut.clear()
    await wait_until(lambda: any(not r.running or lagging.replica_id in r.members.needs_copy for r in others))
    assert all(r.running for r in others), [r.error for r in others]
    # Else no driver would hear of it, and nobody heal it.
    await wait_until(lambda: any(r.replica_id in group.node_of(r).reports_due for r in others))
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
    group, nodes = await group_of()
    for node in nodes:
        node.log.shared.cache = EntryCache(0)  # what is read from the log is read from its files
        node.log.shared.files = LackingFiles()
    lagging, others = await one_lags(group)
    for replica in others:
        group.node_of(replica).log.shared.files.refusals = 2
    nodes[0].network.cut.clear()
    await group.caught_up(lagging)
    assert min(group.node_of(r).log.shared.files.refusals for r in others) == 0
    assert all(r.running for r in others), [r.error for r in others]


async def test_a_peer_that_caught_up_after_all_is_told_to_need_no_copy(group_of: MakeGroup) -> None:
    """Its acknowledgement was late; the masters were told that it needs one, and a driver would replace it."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    node = group.node_of(leader)
    peer = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(peer)
    leader.members.needs_copy[peer.replica_id] = "it has nothing that matches"
    node.reports_due.clear()
    await wait_until(lambda: not leader.members.needs_copy)
    assert leader.replica_id in node.reports_due

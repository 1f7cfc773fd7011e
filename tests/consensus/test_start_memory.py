"""What a start holds of a log that the store does not need any more: nothing; and whom it can still bring up to date."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from stele.model.ids import NodeId
from tests.consensus.cluster import Network, TestNode, make_group, pairs, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

LOG_MB = 128
CACHE_MB = 32
"""What the log itself keeps of the newest entries, at most."""
SCRIPT = f"import sys; from {__name__} import started; started(*sys.argv[1:])"


def started(directory: str, node_id: str, tablet_id: str) -> None:
    """In a process of its own: start the node's replica, and say by how much that raised its peak of memory, in kB."""

    def peak_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    async def run() -> None:
        network = Network()
        first, small = await make_group(Path(directory, "other"), 1)  # all that is imported late is here now
        await first.write(rows([1]))
        await small[0].stop()
        before = peak_kb()
        node = await TestNode(network, Path(directory, "n0"), NodeId(node_id)).start()
        (replica,) = node.replicas
        assert replica.tablet_id == tablet_id
        await wait_until(lambda: replica.is_leader and replica.applied_index == replica.core.log.last_index)
        print(peak_kb() - before)
        await node.stop()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["table", "keyspace"])
async def test_a_start_does_not_hold_what_was_flushed(group_of: MakeGroup, tmp_path: Path, kind: str) -> None:
    """A node that had loaded rows well within its memory was killed for it at every start, until its log was let go."""
    group, nodes = await group_of(1, kind=kind)
    for number in range(LOG_MB // 2):
        if kind == "table":
            await group.write(rows([number], "x" * 2_000_000))
        else:
            await group.write(pairs(b"key", b"x" * 2_000_000))
        if number % 8 == 7:
            await (await group.leader()).storage.flush()
    replica = await group.leader()
    assert replica.storage.stream.start.index == 0 and replica.core is not None
    assert replica.machine.flushed.index > replica.core.log.last_index - 8
    await nodes[0].stop()
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SCRIPT, str(tmp_path), nodes[0].node_id, group.tablet_id],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    (grown_kb,) = [line for line in ended.stdout.splitlines() if line.isdigit()]
    grown_mb = int(grown_kb) >> 10
    assert grown_mb < (CACHE_MB + LOG_MB) // 2


async def test_who_lags_is_brought_up_by_a_leader_that_was_started_since(group_of: MakeGroup) -> None:
    """The leader holds nothing of what the peer lacks, and finds it in its log: terms, configurations and all."""
    group, nodes = await group_of(3)
    await group.write(rows([0]))
    leader = await group.leader()
    lagging = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(lagging.host.node_id)
    for number in range(1, 20):
        await group.write(rows([number]))
    for at, node in enumerate(group.nodes):
        if node is not group.node_of(lagging):
            replica = node.replicas.get(group.tablet_id)
            await wait_until(lambda replica=replica: len(table(replica)) == 20)
            await replica.storage.flush()
            group.nodes[at] = await node.restart()
    leader = await group.leader()
    assert leader.core is not None
    assert leader.core.log.tail_first > lagging.applied_index + 1
    nodes[0].network.cut.clear()
    await group.caught_up(lagging)
    assert len(table(lagging)) == 20
    assert not leader.members.needs_copy and lagging.running

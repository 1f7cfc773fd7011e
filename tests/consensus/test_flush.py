"""What a flush lets go of the log: what its file holds, and nothing that was applied while it was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.consensus.cluster import Network, TestNode, make_group, rows, table

T = TypeVar("T")


class HeldThreads(TestNode):
    """A node whose next flush is written when the test says so."""

    hold: asyncio.Event | None = None

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        if self.hold is not None and getattr(work, "__name__", "") == "write":
            await self.hold.wait()
        return await super().in_thread(work, *args)


async def test_rows_that_come_while_a_flush_is_written_stay_in_the_log(tmp_path: Path) -> None:
    """The log would end up beginning behind the store: FAILED at the next start, on each replica that flushed."""
    network = Network()
    group, _ = await make_group(tmp_path, 1, network=network)
    await group.nodes[0].stop()
    node = group.nodes[0] = await HeldThreads(network, tmp_path / "n0", group.nodes[0].node_id).start()
    try:
        await group.write(rows([1_000]))
        leader = await group.leader()
        node.hold = asyncio.Event()
        flush = asyncio.ensure_future(leader.storage.flush())
        await asyncio.sleep(0)
        await group.fill_segments()
        node.hold.set()
        flushed = await flush
        assert flushed.index < leader.applied_index - 20
        await node.in_thread(node.log.collect)
        assert leader.storage.stream.start.index <= flushed.index
        before = table(leader)
        group.nodes = [node := await node.restart()]
        leader = await group.leader()
        assert table(leader) == before and 1_000 in before
    finally:
        await node.stop()

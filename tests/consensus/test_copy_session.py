"""What a copy session costs its source, and what a receiver keeps of one that ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.consensus import copy_source, copy_target
from stele.model.errors import Code, Retryable
from stele.model.ids import OpId
from tests.consensus.cluster import Group, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.test_copy import DirectSource, order


async def test_a_session_stands_before_a_byte_is_read(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read every file for its checksum: a tablet that took longer than the answer may take was never healed."""
    group, _ = await group_of(3)
    await group.write(rows(range(100)))
    leader = await group.leader()
    node, open_ = group.node_of(leader), Path.open

    def opened(self: Path, *arguments: object, **more: object) -> object:
        assert node.directory / "copies" not in self.parents
        return open_(self, *arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    session = await node.sessions.begin(leader)
    assert {f.name[:4] for f in session.files} == {"rows", "once", "MANI"}
    assert all(f.size for f in session.files) and session.files[-1].name == "MANIFEST"


async def test_sessions_that_are_being_made_count(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_source, "SESSIONS_MAX", 2)
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    begin = group.node_of(leader).sessions.begin
    three = await asyncio.gather(*(begin(leader) for _ in range(3)), return_exceptions=True)
    refused = [answer for answer in three if isinstance(answer, BaseException)]
    assert len(refused) == 1 and isinstance(refused[0], Retryable) and refused[0].code is Code.THROTTLED


async def brought(group: Group, source: DirectSource, target: TestNode, begun: OpId) -> tuple[int, int]:
    """Bytes that it sent for a witness whose log is not there yet, and bytes of all the files; then it is interrupted."""
    what = order(group, source.node, 4, witness=True, witness_start=begun)
    copy = await target.manager.start_copy(what, source)
    assert copy is not None
    await wait_until(lambda: copy.progress.state == "Installing")
    await copy.cancel()
    return source.sent, copy.progress.bytes_total


async def test_what_has_arrived_is_kept_for_the_same_source_alone(group_of: MakeGroup) -> None:
    """Another replica may have other bytes under the same names."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(1000)))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
    begun = leader.committed_opid
    await group.write(rows([2000]))
    one = group.node_of(leader)
    other = next(node for node in nodes[:3] if node is not one)
    sent, total = await brought(group, DirectSource(one), nodes[3], begun)
    assert total < sent < 1.1 * total  # what a file says of its checksums comes before it
    sent, total = await brought(group, DirectSource(one), nodes[3], begun)
    assert 0 < sent < total / 10
    sent, total = await brought(group, DirectSource(other), nodes[3], begun)
    assert total < sent < 1.1 * total


async def test_a_source_that_gives_no_session_is_given_up(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_target, "SILENT_MAX_S", 0.3)
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    source = DirectSource(nodes[0])
    nodes[0].replicas.get(group.tablet_id).fail("damaged by a test")
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await asyncio.wait_for(copy.wait(), 5)
    assert copy.failed and "no session at source:1" in copy.progress.error
    assert "choose another source" in copy.progress.error and source.begun > 1

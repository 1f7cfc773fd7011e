"""Rounds of upkeep look at who was awake, at whom they keep, and at a part of those at rest; everybody has a turn."""

from __future__ import annotations

import asyncio

import pytest

from stele.consensus import storage
from stele.consensus.replica import Replica
from stele.consensus.superblock import DataState
from stele.model.ids import StreamKey
from stele.tserver import wheel
from stele.tserver.wheel import Wheel
from tests.consensus.cluster import Group, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest, rests

pytestmark = pytest.mark.usefixtures("rests_soon")
GROUPS = 7


async def many_at_rest(group_of: MakeGroup) -> tuple[list[Group], TestNode]:
    """Groups that rest, and one of their nodes."""
    first, nodes, _ = await at_rest(group_of)
    groups = [first] + [await Group(nodes).create() for _ in range(GROUPS - 1)]
    for group in groups:
        await group.write(rows([1]))
    for group in groups:
        await rests(group)
    await wait_until(lambda: not nodes[0].replicas.awake)
    return groups, nodes[0]


def keys(replicas: list[Replica]) -> list[StreamKey]:
    return [replica.superblock.key for replica in replicas]


async def test_who_rests_has_its_turn_and_who_was_awake_has_the_next(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "PARTS", 4)
    groups, node = await many_at_rest(group_of)
    turns = Wheel(node.replicas)
    everybody = set(node.replicas.keys())
    assert set(keys(turns.turn())) == everybody, "whoever is there when the wheel is made is new to it"
    for _ in range(5):
        seen = [keys(turns.turn()) for _ in range(4)]
        assert max(map(len, seen)) == 2, "a fourth of seven"
        assert {key for turn in seen for key in turn} == everybody
    woken = groups[3].replica(1)
    await groups[3].write(rows([2]))
    await rests(groups[3])
    await wait_until(lambda: not node.replicas.awake)
    assert woken.superblock.key in keys(turns.turn()), "though it rests again"
    turns.keep(woken)
    for _ in range(9):
        turn = turns.turn()
        assert keys(turn).count(woken.superblock.key) == 1
        turns.keep(woken)
    gone = groups[4].replica(1)
    turns.keep(gone)
    await node.manager.delete(groups[4].tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "a test")
    assert gone.superblock.key not in {key for _ in range(8) for key in keys(turns.turn())}


async def test_the_log_of_who_rests_is_looked_at_in_its_turn(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LOG_KEPT_MS", 200)
    groups, node = await many_at_rest(group_of)
    looked: list[storage.Storage] = []
    anchor_log = storage.Storage.anchor_log

    def counted(self: storage.Storage, now_ms: int) -> None:
        looked.append(self)
        anchor_log(self, now_ms)

    await node.log_space.collect()
    monkeypatch.setattr(storage.Storage, "anchor_log", counted)
    await groups[0].write(rows([3]))
    mine = groups[0].replica(1)
    await mine.storage.flush()
    await rests(groups[0])
    await wait_until(lambda: not node.replicas.awake)
    await node.log_space.collect()
    assert mine.storage in looked, "it was awake"
    await asyncio.sleep(0.3)
    looked.clear()
    turns = 2 * GROUPS + 2
    for _ in range(turns):
        await node.log_space.collect()
    assert len(looked) == turns, "a twelfth of seven each time"
    assert {each.storage for each in node.replicas} == set(looked)
    state = node.log.shared.states[mine.superblock.key]
    assert state.anchors["peers"].index == state.flushed + 1


async def test_a_follower_whose_log_was_let_go_hears_it(group_of: MakeGroup) -> None:
    """The core must know where its log begins, or it offers peers entries that are gone."""
    _, node = await many_at_rest(group_of)
    replica = next(iter(node.replicas))
    core = replica.core
    assert core is not None
    before, last = core.log.start, core.log.last_opid
    node.log_space._tell({replica.superblock.key: last})
    await wait_until(lambda: core.log.start == last)
    assert before != last

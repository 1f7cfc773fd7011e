"""A group at rest costs its nodes nothing: no tick, no look, no sum. Whatever wakes it has it ticked again."""

from __future__ import annotations

import asyncio

import pytest

from stele.consensus import quiet, storage
from stele.raft.messages import UpdateRequest
from tests.consensus.cluster import Group, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest, resting, rests

pytestmark = pytest.mark.usefixtures("rests_soon")


async def test_who_rests_is_not_ticked_and_who_wakes_is(group_of: MakeGroup) -> None:
    group, nodes, leader = await at_rest(group_of)
    await wait_until(lambda: not any(node.replicas.awake for node in nodes))
    assert leader.runtime is not None
    before = leader.runtime.ticked_ms
    await asyncio.sleep(0.1)
    assert leader.runtime.ticked_ms == before
    await group.write(rows([2]))
    assert [len(node.replicas.awake) for node in nodes] == [1, 1, 1]
    await wait_until(lambda: leader.runtime is not None and leader.runtime.ticked_ms > before)
    await rests(group)
    await wait_until(lambda: not any(node.replicas.awake for node in nodes))


async def test_who_was_woken_by_a_write_rests_no_sooner_than_others(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of its last tick lies before its rest."""
    group, _, leader = await at_rest(group_of)
    await asyncio.sleep(0.3)
    monkeypatch.setattr(quiet, "QUIET_AFTER_MS", 60_000)
    await group.write(rows([2]))
    assert leader.host.now_ms() - leader.active_ms < 250
    await asyncio.sleep(0.5)
    assert not resting(leader)


async def test_a_replica_that_fails_or_goes_at_rest_does_not_rest_for_its_node(group_of: MakeGroup) -> None:
    group, _, leader = await at_rest(group_of)
    follower = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(follower)
    assert node.quiet is not None and node.quiet.resting == 1
    follower.fail("test")
    await wait_until(lambda: node.quiet is not None and not node.quiet.resting)
    assert not resting(follower)
    await wait_until(lambda: not any(resting(r) for r in group.replicas()))


async def test_a_failed_replica_does_not_rest_with_its_leader(group_of: MakeGroup) -> None:
    """It rested when its leader began a rest before it had heard of the failure. Then nobody ever heard of it."""
    group, _, leader = await at_rest(group_of)
    follower = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(follower)
    assert leader.core is not None and node.quiet is not None
    status = leader.core.status()
    last = status.last_logged
    quiet_message = UpdateRequest(
        status.term, last, (), status.commit_index, 0, leader.host.now_ms(), last.index
    )
    assert node.quiet.take(follower, leader.replica_id, quiet_message)
    follower.fail("test")
    await wait_until(lambda: node.quiet is not None and not node.quiet.resting)
    assert not node.quiet.take(follower, leader.replica_id, quiet_message)
    assert not node.quiet.resting and not resting(follower)


async def test_what_rests_is_summed_as_it_comes_and_goes(group_of: MakeGroup) -> None:
    group, nodes, _ = await at_rest(group_of)
    others = [await Group(nodes).create() for _ in range(3)]
    for other in others:
        await other.write(rows([1]))
    for each in (group, *others):
        await rests(each)
    for number in range(4):
        await others[number % 3].write(rows([2]))
        await rests(others[number % 3])
    groups = [quiet_groups for node in nodes if (quiet_groups := node.quiet) is not None]

    def agree() -> bool:
        """What each says of another is what that one says of it."""
        for number, mine in enumerate(groups):
            for at, node in enumerate(nodes):
                theirs = groups[at]._shared.get(nodes[number].node_id)
                own = mine._shared.get(node.node_id)
                if at != number and (own is None or theirs is None or own.digest != theirs.digest):
                    return False
        return all(each.resting == 4 for each in groups)

    await wait_until(agree)
    for each in groups:
        for shared in each._shared.values():
            assert shared.digest == sum(each._resting[key].digest for key in shared.keys) % (1 << 64)


async def test_the_log_of_a_group_at_rest_is_let_go_once_it_is_flushed(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _, leader = await at_rest(group_of)
    node = group.node_of(leader)
    monkeypatch.setattr(storage, "LOG_KEPT_MS", 1_000)
    states = node.log.shared.states[leader.superblock.key]
    now = leader.host.now_ms()
    leader.storage.anchor_log(now)
    kept_from = states.anchors["peers"].index
    flushed = await leader.storage.flush()
    assert flushed.index >= kept_from
    leader.storage.anchor_log(now + 500)
    assert states.anchors["peers"].index == kept_from, "a copy may still come for it"
    for later in (1_600, 1_700):
        leader.storage.anchor_log(now + later)
    assert states.anchors["peers"].index == flushed.index + 1
    await group.write(rows([5]))
    await leader.storage.flush()
    for later in (2_000, 3_100, 3_200):
        leader.storage.anchor_log(now + later)
    assert states.anchors["peers"].index > flushed.index + 1


async def test_who_is_removed_at_rest_rests_no_more(group_of: MakeGroup) -> None:
    group, _, leader = await at_rest(group_of)
    follower = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(follower)
    await follower.stop()
    assert node.quiet is not None and not node.quiet.resting
    assert node.quiet._shared == {}
    await wait_until(lambda: not resting(leader))

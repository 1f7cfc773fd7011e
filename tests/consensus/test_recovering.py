"""A replica becomes the only voter after a lost majority; the others return, and nothing of theirs counts."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stele.consensus.recovering import SoleVoter, check_order, with_incarnation
from stele.consensus.replica import ReplicaState
from stele.consensus.superblock import read_superblock, write_superblock
from stele.model.alter import altered
from stele.model.config import MemberType, Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.model.incarnation import MARK_BITS, RECOVERIES_AHEAD_MAX, raised, recoveries
from stele.model.steps import AddColumn
from stele.rpc.convert import id_to_pb, peer_to_pb
from stele.rpc.convert_schema import schema_to_pb
from stele.rpc.proto import consensus_pb2, tserver_pb2
from stele.tablet.store import TabletStore
from stele.tserver.admin_service import AdminService
from stele.tserver.consensus_service import ConsensusService
from stele.tserver.fences import Fences
from tests.consensus.cluster import SCHEMA, Group, TestNode, leads, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

ONCE = raised(0, 42)
FAR = (RECOVERIES_AHEAD_MAX + 1) << MARK_BITS


def order_for(group: Group, number: int, incarnation: int = ONCE, term: int = 0) -> SoleVoter:
    replica = group.replica(number)
    assert replica.core is not None
    status = replica.core.status()
    return SoleVoter(
        replica.superblock.key,
        incarnation,
        term or status.term + 1,
        status.last_logged,
        "two volumes are gone",
    )


async def led_alone(group: Group, number: int) -> None:
    await wait_until(lambda: leads(group.replica(number)))


@pytest.mark.usefixtures("quick_elections")
async def test_the_survivor_serves_alone_with_all_that_its_log_holds(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows(range(20)))
    leader = await group.leader()
    number = next(n for n in (1, 2, 3) if n != leader.replica_id)
    survivor = nodes[number - 1]
    await group.caught_up(group.replica(number))
    for node in nodes:
        if node is not survivor:
            await node.stop()
    order = order_for(group, number)
    config, changed = await survivor.manager.make_sole_voter(order)
    assert changed
    await led_alone(group, number)
    replica = group.replica(number)
    assert table(replica) == {i: f"x{i}" for i in range(20)}
    await replica.writes.propose(rows([99]), 5_000)
    assert [p.replica_id for p in replica.committed_config.peers] == [number]
    assert replica.committed_config.incarnation == ONCE == replica.superblock.tablet_incarnation
    again, changed = await survivor.manager.make_sole_voter(order)
    assert not changed and again == config, "the order comes again until a report tells that it was done"
    nodes[number - 1] = group.nodes[number - 1] = await survivor.restart()
    await led_alone(group, number)
    assert table(group.replica(number))[99] == "x99"


async def test_a_crash_after_the_superblock_leaves_a_replica_that_does_nothing_until_it_is_ordered_again(
    group_of: MakeGroup,
) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    await group.caught_up(group.replica(2))
    replica = group.replica(2)
    for node in nodes:
        await node.stop()
    write_superblock(
        replica.directory, with_incarnation(replica.superblock, order_for_stopped(group, replica))
    )
    nodes[1] = group.nodes[1] = await nodes[1].restart()
    nodes[0] = group.nodes[0] = await nodes[0].restart()
    await wait_until(lambda: group.replica(1).state is ReplicaState.FAILED)
    half = group.replica(2)
    assert half.running and not half.is_leader
    with pytest.raises(Retryable):
        half.writes.submit(rows([2]))
    await nodes[1].manager.make_sole_voter(order_for(group, 2))
    await led_alone(group, 2)
    assert table(group.replica(2)) == {1: "x1"}


def order_for_stopped(group: Group, replica: object) -> SoleVoter:
    key = replica.superblock.key  # type: ignore[attr-defined]
    return SoleVoter(key, ONCE, 9)


async def test_orders_that_do_not_fit_are_refused_and_change_nothing(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    manager, order = nodes[0].manager, order_for(group, 1)
    for wrong, code in (
        (replace(order, at_least=OpId(order.at_least.term, order.at_least.index + 9)), Code.CAS_FAILED),
        (replace(order, incarnation=0), Code.STALE_INCARNATION),
        (replace(order, incarnation=FAR), Code.STALE_INCARNATION),
        (replace(order, key=order.key._replace(replica_id=7)), Code.NOT_FOUND),
    ):
        with pytest.raises(Rejected) as refused:
            await manager.make_sole_voter(wrong)
        assert refused.value.code is code
    once = with_incarnation(group.replica(1).superblock, order)
    other = replace(order, incarnation=raised(0, 43))
    check_order(once, order.at_least, replace(order, incarnation=raised(ONCE)))
    for mine, wrong in ((order, other), (other, order)):
        with pytest.raises(Rejected) as refused:  # two recoveries that did not know of each other
            check_order(with_incarnation(once, mine), order.at_least, wrong)
        assert refused.value.code is Code.STALE_INCARNATION
    group.replica(1).fail("damaged")
    with pytest.raises(Rejected, match="damaged"):
        await manager.make_sole_voter(order)
    assert read_superblock(group.replica(1).directory).tablet_incarnation == 0


@pytest.mark.usefixtures("quick_elections")
@pytest.mark.parametrize("written", [False, True])
async def test_a_disk_that_refuses_leaves_a_replica_that_can_be_ordered_again(
    group_of: MakeGroup, written: bool
) -> None:
    """`written`: whether the higher incarnation is on the disk when the error comes."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    await group.caught_up(group.replica(2))
    for node in (nodes[0], nodes[2]):
        await node.stop()
    survivor, in_thread = nodes[1], nodes[1].in_thread

    async def full(work: Any, *args: Any) -> Any:
        if work is not write_superblock:
            return await in_thread(work, *args)
        if written:
            await in_thread(work, *args)
        raise OSError(errno.ENOSPC, "no space left on device")

    order = order_for(group, 2)
    survivor.in_thread = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        await survivor.manager.make_sole_voter(order)
    survivor.in_thread = in_thread  # type: ignore[method-assign]
    assert group.replica(2).superblock.tablet_incarnation == (ONCE if written else 0)
    await survivor.manager.make_sole_voter(order)
    await led_alone(group, 2)
    assert table(group.replica(2)) == {1: "x1"}


@pytest.mark.usefixtures("quick_elections")
@pytest.mark.parametrize("returning", list(itertools.permutations((0, 1))), ids=str)
async def test_old_members_that_return_in_any_order_neither_commit_nor_answer(
    group_of: MakeGroup, returning: tuple[int, ...]
) -> None:
    """They still are a majority among themselves, and may lead and commit until they hear of the recovery."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    for replica in group.replicas():
        await group.caught_up(replica)
    network, survivor = nodes[0].network, nodes[2]
    network.cut.update(n.node_id for n in nodes)
    old = [nodes[i] for i in returning]
    await survivor.manager.make_sole_voter(order_for(group, 3, term=50))
    await led_alone(group, 3)
    await group.replica(3).writes.propose(rows([3], "new"), 5_000)
    for node in old:
        network.cut.discard(node.node_id)
        await asyncio.sleep(0.3)
    with_each_other = await group.leader()  # the survivor is cut off from them
    assert with_each_other.replica_id in (1, 2)
    await with_each_other.writes.propose(rows([2], "old"), 5_000)
    network.cut.discard(survivor.node_id)
    await wait_until(lambda: all(group.replica(n).state is ReplicaState.FAILED for n in (1, 2)))
    for number in (1, 2):
        with pytest.raises(Retryable):
            await group.replica(number).reads.linearizable_read(100)
    assert group.replica(3).is_leader and table(group.replica(3)) == {1: "x1", 3: "new3"}


@pytest.mark.usefixtures("quick_elections")
@pytest.mark.parametrize("seed", range(6))
async def test_under_random_cuts_nothing_of_the_old_incarnation_counts_under_the_new(
    group_of: MakeGroup, seed: int
) -> None:
    """Writes go to whoever leads, in both incarnations; after each step the rows of the new one are those that it
    acknowledged, perhaps those whose outcome it left open, and none that only the old one took."""
    rng = random.Random(seed)
    group, nodes = await group_of(5)
    await group.write(rows([0]))
    for replica in group.replicas():
        await group.caught_up(replica)
    network = nodes[0].network
    number = rng.randint(1, 5)
    network.cut.update(n.node_id for n in nodes)
    await nodes[number - 1].manager.make_sole_voter(order_for(group, number, term=90))
    await led_alone(group, number)
    acknowledged, left_open = {0: "x0"}, dict[int, str]()

    def judge() -> None:
        found = table(group.replica(number))
        assert acknowledged.items() <= found.items() <= {**acknowledged, **left_open}.items()

    for step in range(1, 14):
        network.cut = {n.node_id for n in nodes if rng.random() < 0.3}
        await asyncio.sleep(rng.random() * 0.2)
        for replica in group.replicas():
            if not replica.is_leader:
                continue
            incarnation = recoveries(replica.superblock.tablet_incarnation)
            key = step * 10 + replica.replica_id
            try:
                await replica.writes.propose(rows([key], f"i{incarnation}-"), 300)
            except Retryable:
                told = left_open
            else:
                told = acknowledged
            if incarnation:
                told[key] = f"i1-{key}"
        judge()
    network.cut.clear()
    await wait_until(
        lambda: all(r.state is ReplicaState.FAILED for r in group.replicas() if r.replica_id != number)
    )
    judge()


def orders_of(node: TestNode) -> Fences:
    """Fences of a node that has heard of no catalog and no driver."""
    volume: Any = SimpleNamespace(record=SimpleNamespace(catalog=OPID_NONE, driver_epoch=0))
    return Fences(volume, node.in_thread)


@pytest.mark.usefixtures("quick_elections")
async def test_an_order_made_for_a_configuration_that_was_given_up_is_refused(group_of: MakeGroup) -> None:
    """The lost ones had committed a configuration at the very index at which the survivor's is."""
    group, nodes = await group_of(spare=1)
    await group.write(rows([1]))
    survivor = nodes[2]
    await group.caught_up(group.replica(3))
    for node in nodes[:2]:
        await node.stop()
    config, _ = await survivor.manager.make_sole_voter(order_for(group, 3))
    await led_alone(group, 3)
    await group.replica(3).reads.linearizable_read()
    nothing: Any = None
    service = ConsensusService(
        nothing,
        nothing,
        survivor.replicas,
        survivor.manager,
        orders_of(survivor),
        copy_source=nothing,
        changed=nothing,
    )
    added = Peer(nodes[3].node_id, ReplicaId(4), "n4:1", MemberType.NON_VOTER)
    late = consensus_pb2.BulkChangeConfigRequest(
        tablet_id=id_to_pb(group.tablet_id),
        type=consensus_pb2.ADD_PEER,
        peer=peer_to_pb(added),
        cas_config_opid_index=config.opid_index,
    )
    with pytest.raises(Rejected) as refused:
        await service.BulkChangeConfig(late, None)
    assert refused.value.code is Code.STALE_INCARNATION
    assert group.replica(3).config == config
    late.tablet_incarnation = ONCE
    await service.BulkChangeConfig(late, None)
    assert group.replica(3).committed_config.peer(4) == added


@pytest.mark.usefixtures("quick_elections")
async def test_a_survivor_takes_a_schema_several_versions_ahead_and_no_other_replica_does(
    group_of: MakeGroup,
) -> None:
    """It was away while the table was altered, and who had the versions between is lost."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    survivor = nodes[2]
    await group.caught_up(group.replica(3))
    ahead = altered(altered(SCHEMA, [AddColumn("a", "int8", True)]), [AddColumn("b", "int8", True)])
    request = tserver_pb2.AlterTabletRequest(tablet_id=id_to_pb(group.tablet_id), schema=schema_to_pb(ahead))

    async def ordered(node: TestNode) -> int:
        service = AdminService(node.node_id, node.replicas, node.manager, orders_of(node))
        return (await service.AlterTablet(request, None)).schema_version

    with pytest.raises(Rejected, match="expected the next version"):
        await ordered(group.node_of(await group.leader()))
    for node in nodes[:2]:
        await node.stop()
    await survivor.manager.make_sole_voter(order_for(group, 3))
    await led_alone(group, 3)
    assert await ordered(survivor) == ahead.version == SCHEMA.version + 2
    nodes[2] = group.nodes[2] = await survivor.restart()
    await led_alone(group, 3)
    machine = group.replica(3).machine
    assert isinstance(machine, TabletStore) and machine.schema == ahead

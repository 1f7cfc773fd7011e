"""Three masters on the in-memory port: the claim of the one driver, and its intents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master import driving
from stele.master.port import swap
from stele.master.records import TabletRecord
from stele.model.config import Configuration, Peer
from stele.model.errors import Code
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    World,
    claimed,
    hex_of,
    in_force,
    one_tablet,
    ready,
    refused,
    world,
)


async def healing(w: World) -> tuple[TabletRecord, int, pb.IntentPB]:
    """A tablet for which a driver has begun another replica: its row, the driver's epoch, and what it asked for."""
    row, epoch = await one_tablet(w), await claimed(w)
    target = min(n for n in w.nodes if row.config.peer_on(n) is None)
    asked = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target))
    await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
    return row, epoch, asked


def end(row: TabletRecord, epoch: int, index: int) -> pb.EndIntentRequest:
    """The new replica, which is number 4, is a member since the configuration with this index."""
    return pb.EndIntentRequest(
        epoch=epoch,
        tablet_id=id_to_pb(row.tablet_id),
        replica_id=4,
        committed_config=config_to_pb(Configuration(index, row.config.peers)),
        term=1,
    )


async def test_one_driver_at_a_time(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        epoch = await claimed(w)
        other = pb.ClaimDriverRequest(holder="d2", ttl_ms=60_000)
        refusal = await refused(w.leader.ClaimDriver(other, None))
        assert refusal.code is Code.NOT_READY
        w.shift_ms += 3_000
        assert str(await refused(w.leader.ClaimDriver(other, None))) == str(refusal)  # one event, not many
        renewed = pb.ClaimDriverRequest(holder="d1", ttl_ms=60_000, epoch=epoch)
        assert (await w.leader.ClaimDriver(renewed, None)).claim.epoch == epoch
        again = await claimed(w)  # the same driver after a restart
        assert again == epoch + 1
        assert (await refused(w.leader.ClaimDriver(renewed, None))).code is Code.STALE_EPOCH
        await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d1", epoch=again, release=True), None)
        assert (await w.leader.ClaimDriver(other, None)).claim.epoch == again + 1


async def test_a_cluster_that_hibernates_holds_every_driver_back(tmp_path: Path) -> None:
    """Also the one that has the claim: its orders are stale at once, not only when it would renew."""
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch, asked = await healing(w)

        async def policy(held: str) -> None:
            told = pb.DriverPolicyPB(dead_after_ms=30_000, max_lost_nodes=1, max_copies=4, held=held)
            await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=told), None)

        await policy("TabletCluster data/flights hibernates")
        await policy("TabletCluster data/flights hibernates")  # as the operator repeats it
        ended = (await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)).claim
        assert (ended.holder, ended.epoch, ended.expires_us) == ("", epoch + 1, 0)
        begin = w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
        for late in (begin, w.leader.EndIntent(end(row, epoch, 9), None)):
            assert (await refused(late)).code is Code.STALE_EPOCH
        for holder in ("d1", "d2"):
            for of_epoch in (0, epoch, epoch + 1):
                claim = pb.ClaimDriverRequest(holder=holder, ttl_ms=60_000, epoch=of_epoch)
                error = await refused(w.leader.ClaimDriver(claim, None))
                assert error.code is Code.NOT_READY
                assert "no driver may work now: TabletCluster data/flights hibernates" in str(error)
        by_hand = pb.ClaimDriverRequest(holder="ann", ttl_ms=60_000, override_held=True)
        mine = (await w.leader.ClaimDriver(by_hand, None)).claim.epoch
        await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="ann", epoch=mine, release=True), None)
        await policy("")
        assert await claimed(w) == mine + 1


async def test_a_policy_that_forbids_masters_to_drive_takes_the_claim_from_one(tmp_path: Path) -> None:
    """A master that had read the policy before took the claim after it, and began to heal."""
    async with world(tmp_path) as w:
        await ready(w)
        master = pb.ClaimDriverRequest(holder="master/m1", ttl_ms=60_000)
        taken = (await w.leader.ClaimDriver(master, None)).claim
        policy = pb.DriverPolicyPB(dead_after_ms=30_000, max_lost_nodes=1, max_copies=4, drive_after_ms=0)
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), None)
        ended = (await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)).claim
        assert (ended.holder, ended.epoch, ended.expires_us) == ("", taken.epoch + 1, 0)
        for epoch in (0, taken.epoch, ended.epoch):
            master.epoch = epoch
            error = await refused(w.leader.ClaimDriver(master, None))
            assert error.code is Code.NOT_READY and "the policy forbids it" in str(error)

        # A driver's own claim outlives that policy, and a later one lets masters drive again.
        claim = pb.ClaimDriverRequest(holder="d1", ttl_ms=60_000)
        claim.epoch = (await w.leader.ClaimDriver(claim, None)).claim.epoch
        policy.owner = "d1"
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), None)
        await w.leader.ClaimDriver(claim, None)
        claim.release = True
        await w.leader.ClaimDriver(claim, None)
        policy.drive_after_ms = 4_000
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), None)
        master.epoch = 0
        assert (await w.leader.ClaimDriver(master, None)).claim.holder == "master/m1"


@pytest.mark.parametrize("ahead_ms", [0, 7_200_000, -7_200_000], ids=["right", "ahead", "behind"])
async def test_no_wall_clock_decides_how_long_a_killed_drivers_claim_lasts(
    tmp_path: Path, ahead_ms: int
) -> None:
    """A claim that a master with a clock two hours ahead had granted outlived its driver by two hours."""
    async with world(tmp_path) as w:
        w.wall_ahead_ms = ahead_ms
        await claimed(w)
        other = pb.ClaimDriverRequest(holder="d2", ttl_ms=60_000)
        assert (await refused(w.leader.ClaimDriver(other, None))).code is Code.NOT_READY
        w.wall_ahead_ms = 0
        await w.elect(MASTERS[1])
        assert (await refused(w.leader.ClaimDriver(other, None))).code is Code.NOT_READY
        w.shift_ms += 60_000
        taken = (await w.leader.ClaimDriver(other, None)).claim
        assert (taken.holder, taken.epoch) == ("d2", 2)
        w.wall_ahead_ms = 7_200_000  # set right under a leader: nobody's claim ends by it
        third = pb.ClaimDriverRequest(holder="d3", ttl_ms=60_000)
        assert (await refused(w.leader.ClaimDriver(third, None))).code is Code.NOT_READY


async def test_an_order_that_waits_for_a_lock_is_refused_if_its_driver_loses_the_claim_meanwhile(
    tmp_path: Path,
) -> None:
    """A node's state was changed by a driver that another had replaced before it was that order's turn."""
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch, asked = await healing(w)
        node, lead = hex_of(asked.target_node), w.lead
        move = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(node), state=pb.DRAINING)
        asked.replica_id = 4
        orders = (
            driving.set_node_state(lead, move),
            driving.begin_intent(lead, pb.BeginIntentRequest(epoch=epoch, intent=asked)),
            driving.end_intent(lead, end(row, epoch, 9)),
        )
        async with lead.locks.hold(tables=(f"node/{node}",), tablets=(row.tablet_id,)):
            waiting = [asyncio.create_task(order) for order in orders]
            assert await claimed(w) == epoch + 1
            assert not any(task.done() for task in waiting)
        for task in waiting:
            assert (await refused(task)).code is Code.STALE_EPOCH
        assert w.catalog.nodes[node].state == "ACTIVE"
        assert w.catalog.intents[row.tablet_id].epoch == epoch


async def test_an_order_that_comes_behind_another_claim_in_the_log_is_refused(tmp_path: Path) -> None:
    """That claim was proposed, and not applied, when the order was looked at: the next driver, which had its answer, then saw
    the cluster as it was before the order."""
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch, asked = await healing(w)
        node, taken = hex_of(asked.target_node), pb.IntentPB()
        taken.CopyFrom(asked)
        taken.replica_id = 4
        spare = next(n for n in w.nodes if n != node and row.config.peer_on(n) is None)
        fresh = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(spare))

        def orders(epoch: int) -> list[tuple[str, object]]:
            state = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(node), state=pb.DRAINING)
            return [
                ("SetNodeState", state),
                ("BeginIntent", pb.BeginIntentRequest(epoch=epoch, intent=taken)),
                ("EndIntent", end(row, epoch, 9)),
                ("BeginIntent", pb.BeginIntentRequest(epoch=epoch, intent=fresh)),
            ]

        for number in range(4):
            if number == 3:
                await w.leader_call("EndIntent", end(row, epoch, 9))
            before = dict(w.catalog.intents)
            method, late = orders(epoch)[number]
            epoch, error = await asyncio.gather(claimed(w), refused(w.leader_call(method, late)))
            assert error.code is Code.STALE_EPOCH
            assert w.catalog.intents == before and w.catalog.nodes[node].state == "ACTIVE"
        renewal = pb.ClaimDriverRequest(holder="d1", ttl_ms=1, epoch=epoch)
        _, begun = await asyncio.gather(
            w.leader.ClaimDriver(renewal, None), w.leader_call(method, orders(epoch)[3][1])
        )
        assert begun.intent.replica_id == 5 and begun.intent.epoch == epoch, "its own claim, renewed"  # type: ignore[attr-defined]


async def test_intents(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        epoch = await claimed(w)
        held = {p.node_id for p in row.config.peers}
        target, spare = sorted(n for n in w.nodes if n not in held)

        def begin(node: str, **fields: int) -> pb.BeginIntentRequest:
            intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(node), **fields)
            return pb.BeginIntentRequest(epoch=epoch, intent=intent)

        stale = begin(target)
        stale.epoch = epoch + 5
        assert (await refused(w.leader.BeginIntent(stale, None))).code is Code.STALE_EPOCH
        assert (await refused(w.leader.BeginIntent(begin(min(held)), None))).code is Code.INVALID_ARGUMENT
        await w.move(spare, pb.DRAINING, epoch=epoch)
        assert "DRAINING" in str(await refused(w.leader.BeginIntent(begin(spare), None)))
        intent = (await w.leader.BeginIntent(begin(target), None)).intent
        assert intent.replica_id == 4 and intent.config_index == -1
        assert (await refused(w.leader.BeginIntent(begin(target), None))).code is Code.CHANGE_IN_PROGRESS
        taken = (await w.leader.BeginIntent(begin(target, replica_id=4), None)).intent
        assert taken.replica_id == 4

        assert (await refused(w.leader.EndIntent(end(row, epoch, -1), None))).code is Code.CAS_FAILED
        await w.leader.EndIntent(end(row, epoch, 9), None)
        assert not w.catalog.intents and w.catalog.tablets[row.tablet_id].config.opid_index == 9
        await w.leader.EndIntent(end(row, epoch, 9), None)  # again: nothing
        assert (await w.leader.BeginIntent(begin(target), None)).intent.replica_id == 5


async def test_an_intent_that_was_taken_over_ends_only_with_a_configuration_written_since(
    tmp_path: Path,
) -> None:
    """The driver before may have sent an order that carries the index which was in force until then."""
    async with world(tmp_path) as w:
        await ready(w)
        row, _, asked = await healing(w)
        await in_force(w, row.tablet_id, Configuration(12, row.config.peers), says=row.leader)
        later = await claimed(w)
        asked.replica_id = 4
        taken = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=later, intent=asked), None)
        assert (taken.intent.epoch, taken.intent.config_index) == (later, 12)

        for late in (11, 12):
            assert (await refused(w.leader.EndIntent(end(row, later, late), None))).code is Code.CAS_FAILED
        assert w.catalog.tablets[row.tablet_id].config.opid_index == 12
        await in_force(w, row.tablet_id, Configuration(15, row.config.peers), says=row.leader)
        await w.leader.EndIntent(end(row, later, 13), None)
        assert not w.catalog.intents
        assert w.catalog.tablets[row.tablet_id].config.opid_index == 15, (
            "what is known already is not forgotten"
        )


async def test_a_table_that_is_dropped_while_it_is_healed_leaves_no_intent(tmp_path: Path) -> None:
    """No driver looks at its tablets any more, and a node that an intent names would never retire."""
    async with world(tmp_path) as w:
        await ready(w)
        _, epoch, asked = await healing(w)
        target = hex_of(asked.target_node)
        await w.move(target, pb.DRAINING, epoch=epoch)
        assert (await refused(w.move(target, pb.RETIRED, epoch=epoch))).code is Code.UNSAFE_CHANGE
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        assert not w.catalog.intents
        late = next(n for n in w.nodes if n != target)
        asked.target_node = id_to_pb(late)
        begin = pb.BeginIntentRequest(epoch=epoch, intent=asked)
        assert "DELETED" in str(await refused(w.leader.BeginIntent(begin, None)))
        await w.move(target, pb.RETIRED, epoch=epoch)
        assert w.catalog.nodes[target].state == "RETIRED"


async def test_an_id_is_above_all_that_anybody_names(tmp_path: Path) -> None:
    """An administrator had added replica 4 by hand: the driver's next one was 4, too, on another node."""
    async with world(tmp_path) as w:
        await ready(w, nodes=8)
        row, epoch = await one_tablet(w), await claimed(w)
        by_hand, target, fresh, third = sorted(n for n in w.nodes if row.config.peer_on(n) is None)[:4]

        async def begun(node: str) -> int:
            asked = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(node))
            answer = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
            return int(answer.intent.replica_id)

        added = Configuration(12, (*row.config.peers, Peer(NodeId(by_hand), ReplicaId(4), "")))
        await in_force(w, row.tablet_id, added, says=row.leader)
        assert w.catalog.tablets[row.tablet_id].next_replica_id == 5
        assert await begun(target) == 5
        await w.leader.EndIntent(
            pb.EndIntentRequest(
                epoch=epoch,
                tablet_id=id_to_pb(row.tablet_id),
                replica_id=5,
                committed_config=config_to_pb(Configuration(13, added.peers)),
                term=1,
            ),
            None,
        )
        # Not in a committed configuration: a copy begun by hand, and a change that a leader has proposed.
        w.nodes[fresh].replicas[(row.tablet_id, 7)] = False
        pending = Configuration(14, (*added.peers, Peer(NodeId(third), ReplicaId(9), "")))
        w.nodes[row.leader].pending[row.tablet_id] = config_to_pb(pending)
        await w.beat()
        assert await begun(target) == 10


async def test_a_row_written_before_ids_followed_configurations_is_mended(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        target = min(n for n in w.nodes if row.config.peer_on(n) is None)
        named = Configuration(12, (*row.config.peers, Peer(NodeId(target), ReplicaId(6), "")))
        await w.lead.commit([swap(row, replace(row, config=named, next_replica_id=4))])
        await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].next_replica_id == 7)


async def test_an_intent_is_not_ended_by_a_replica_of_its_number_on_another_node(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch, asked = await healing(w)
        other = next(n for n in w.nodes if n != hex_of(asked.target_node) and row.config.peer_on(n) is None)
        request = end(row, epoch, -1)
        twin = Peer(NodeId(other), ReplicaId(4), "")
        request.committed_config.CopyFrom(config_to_pb(Configuration(-1, (*row.config.peers, twin))))
        lead = w.lead
        known = lead.catalog.tablets[row.tablet_id]
        await lead.commit([swap(known, replace(known, config=Configuration(-1, (*row.config.peers, twin))))])
        assert (await refused(w.leader.EndIntent(request, None))).code is Code.CAS_FAILED


async def test_a_leader_is_kept_for_a_time_and_given_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)

        async def keep(for_ms: int) -> int:
            request = pb.KeepLeaderRequest(tablet_id=id_to_pb(row.tablet_id), for_ms=for_ms)
            await w.leader.KeepLeader(request, None)
            view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
            (seen,) = (t for t in view.tablets if t.tablet_id == id_to_pb(row.tablet_id))
            return max(0, seen.leader_kept_until_us - view.now_us)

        assert 50_000_000 < await keep(60_000) <= 60_000_000
        await w.elect(MASTERS[1])
        assert 590_000_000 < await keep(600_000) <= 600_000_000, "another master goes on with it"
        assert await keep(0) == 0
        week_ms = 7 * 86_400_000
        refusal = await refused(keep(week_ms + 1))
        assert refusal.code is Code.INVALID_ARGUMENT and "604800 s at most" in str(refusal)
        assert (await refused(w.leader.KeepLeader(pb.KeepLeaderRequest(tablet_id=b"x" * 16), None))).code is (
            Code.NOT_FOUND
        )

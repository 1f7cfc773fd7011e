"""The number of masters: recorded in one batch, shown as the catalog's factor, refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.model.errors import Code
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import MASTERS, Call, Node, World, ready, ready_again, refused, world


def asked(masters: int) -> pb.SetMasterCountRequest:
    """A request."""
    return pb.SetMasterCountRequest(masters=masters)


async def ready_with_masters(w: World, masters: int) -> None:
    """Nodes, and masters that run; those beyond the first three hold no catalog yet."""
    for number in range(masters):
        node_id = MASTERS[number] if number < len(MASTERS) else f"{0xB0 + number:032x}"
        w.nodes[node_id] = RunningMaster(node_id, f"machine-{number}", "z0")
    for node_id in list(w.nodes)[len(MASTERS) :]:
        register = pb.RegisterNodeRequest(node_id=id_to_pb(node_id), role="master")
        await w.leader.RegisterNode(register, Call())
    await w.beat_until(lambda: all(w.catalog.nodes[n].formed for n in w.nodes))
    await ready_again(w)


class RunningMaster(Node):
    """A master as the others hear it."""

    def heartbeat(self, sequence: int) -> pb.TSHeartbeatRequest:
        """A full report with registration."""
        request = super().heartbeat(sequence)
        request.registration.role = "master"
        return request


async def test_it_is_set_shown_and_kept_by_the_next_leader(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready_with_masters(w, 5)
        assert (await w.leader.SetMasterCount(asked(5), None)).before == 3
        assert (await w.leader.SetMasterCount(asked(5), None)).before == 5
        await w.elect(MASTERS[1])
        await ready_again(w)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        factors = {id_from_pb(t.tablet_id): t.replication_factor for t in view.tablets}
        assert factors[CATALOG_TABLET_ID] == 5
        assert (await w.leader.SetMasterCount(asked(1), None)).before == 5
        assert w.catalog.cluster.masters == 1


async def test_a_tablet_cluster_keeps_its_number(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready_with_masters(w, 5)
        policy = pb.DriverPolicyPB(owner="TabletCluster default/flights", dead_after_ms=30_000, max_copies=1)
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), None)
        error = await refused(w.leader.SetMasterCount(asked(5), None))
        assert error.code is Code.INVALID_ARGUMENT and "TabletCluster default/flights describes" in str(error)
        assert "change its spec.masters.replicas" in str(error) and w.catalog.cluster.masters == 3


async def test_the_driver_of_a_tablet_cluster_sets_it_under_its_epoch_only(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready_with_masters(w, 5)
        policy = pb.DriverPolicyPB(owner="TabletCluster default/flights", dead_after_ms=30_000, max_copies=1)
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), None)
        claimed = await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="operator/1", ttl_ms=10_000), None)
        request = pb.SetMasterCountRequest(masters=5, epoch=claimed.claim.epoch)
        assert (await w.leader.SetMasterCount(request, None)).before == 3
        assert (await w.leader.SetMasterCount(request, None)).before == 5
        again = pb.ClaimDriverRequest(holder="operator/1", ttl_ms=10_000)
        newer = (await w.leader.ClaimDriver(again, None)).claim.epoch
        request = pb.SetMasterCountRequest(masters=3, epoch=claimed.claim.epoch)
        error = await refused(w.leader.SetMasterCount(request, None))
        assert error.code is Code.STALE_EPOCH and w.catalog.cluster.masters == 5
        request = pb.SetMasterCountRequest(masters=3, epoch=newer)
        assert (await w.leader.SetMasterCount(request, None)).before == 5


@pytest.mark.parametrize("count", [0, 2, 4, 7])
async def test_another_number_is_refused(tmp_path: Path, count: int) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        error = await refused(w.leader.SetMasterCount(asked(count), None))
        assert error.code is Code.INVALID_ARGUMENT and "expected 1, 3 or 5" in str(error)


async def test_more_masters_than_were_started_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        error = await refused(w.leader.SetMasterCount(asked(5), None))
        assert error.code is Code.INVALID_ARGUMENT and "with `stele master run`" in str(error)
        assert w.catalog.cluster.masters == 3


async def test_fewer_masters_wait_until_so_many_are_heard(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)  # the masters of this world send each other no heartbeats
        error = await refused(w.leader.SetMasterCount(asked(1), None))
        assert error.code is Code.NOT_READY and "masters are heard" in str(error)
        assert w.catalog.cluster.masters == 3

"""Forced promotion over the wire and by the command: a voter is made to lead, and what is refused, and why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stele.client.admin import cluster_view
from stele.client.promotion import promote
from stele.model.errors import Code, Rejected
from stele.model.ids import TabletId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.tserver.options import NodeOptions
from tests.client.commands import runner
from tests.consensus.cluster import STEADY, wait_until
from tests.tserver.local import SCHEMA, LocalCluster, count, fill


async def test_an_order_makes_a_voter_lead_and_promote_refuses_where_it_is_not_needed_or_in_vain(
    tmp_path: Path,
) -> None:
    cluster = await LocalCluster(tmp_path, nodes=3).start()
    try:
        async with cluster.client() as client:
            await client.create_table("t", SCHEMA)
            await fill(client, 20)
            view = await cluster_view(client.masters)
            (tablet,) = [t for t in view.tablets if t.table_name == "t"]
            tablet_id = TabletId(id_from_pb(tablet.tablet_id))
            with pytest.raises(Rejected, match=r"has a leader, replica .* `stele tablet step-down` moves it"):
                await promote(client.masters, client.pool, tablet_id)
            names = [n for n in cluster.ids if n != "master"]
            replicas = {n: cluster.running[n].replicas.get(tablet_id) for n in names}
            heir = next(n for n, r in replicas.items() if not r.is_leader)
            await client.pool.unary(
                cluster.running[heir].address,
                ConsensusServiceStub,
                "RunLeaderElection",
                consensus_pb2.RunLeaderElectionRequest(tablet_id=tablet.tablet_id, reason="a test"),
            )
            await wait_until(lambda: replicas[heir].is_leader)
            assert await count(client) == 20
            lost = [n for n in names if n != heir][:2]
            for name in lost:
                await cluster.stop(name)
            with pytest.raises(Rejected, match="1 of 3 voters answer, which is no majority") as refused:
                async with asyncio.timeout(60):
                    while True:
                        try:
                            await promote(client.masters, client.pool, tablet_id, timeout_s=5)
                        except Rejected as exc:
                            if "has a leader" not in str(exc) and "masters hear its node" not in str(exc):
                                raise
                        await asyncio.sleep(0.2)
            assert refused.value.code is Code.UNSAFE_CHANGE
    finally:
        await cluster.close()


class Unelected(LocalCluster):
    """Its nodes elect nobody by themselves for ten minutes."""

    def options(self, name: str, *, first: bool = False) -> NodeOptions:
        made = super().options(name, first=first)
        raft = replace(STEADY.raft, election_min_ms=600_000, election_max_ms=900_000)
        return made if name == "master" else replace(made, replica=replace(STEADY, raft=raft))


async def test_the_command_makes_a_voter_lead_a_tablet_that_elects_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Unelected(tmp_path, nodes=3).start()
    run = runner(cluster, monkeypatch)
    try:
        async with cluster.client() as client:
            await client.create_table("t", SCHEMA)
            view = await cluster_view(client.masters)
            (tablet,) = [t.tablet_id.hex() for t in view.tablets if t.table_name == "t"]
            nodes = [n for n in cluster.running if n != "master"]
            held = {n: cluster.running[n].replicas.get(TabletId(tablet)) for n in nodes}
            await cluster.stop(next(n for n, r in held.items() if r.is_leader))
            left = [r for r in held.values() if r.running]
            assert len(left) == 2 and not any(r.is_leader for r in left)
            code, _, err = await run("tablet", "promote", "ffff")
            assert code == 2 and "0 tablets begin with ffff" in err, err
            code, out, err = await run("tablet", "promote", tablet[:8], "--reason", "nobody leads")
            assert code == 0, err
            (leader,) = [r for r in left if r.is_leader]
            assert (
                out.startswith(f"tablet {tablet[:8]} of t: replica {leader.replica_id} on ")
                and "leads in term" in out
            )
            await fill(client, 20)
            assert await count(client) == 20
            code, _, err = await run("tablet", "promote", tablet[:8])
            assert code == 2 and "has a leader" in err and "`stele tablet step-down` moves it" in err, err
    finally:
        await cluster.close()

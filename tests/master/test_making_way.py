"""A driver comes while the leading master looks whether there is work: then this master takes no claim."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stele.master.standing_in import StandIn
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, Call, made, ready, until, world

SILENT_MS, STEP_MS = 3_000, 500


async def test_a_driver_that_is_heard_during_the_look_keeps_the_master_from_driving(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS) as w:
        await ready(w, 5)
        await made(w, rf=3, buckets=4)
        policy = pb.DriverPolicyPB(
            dead_after_ms=SILENT_MS, max_lost_nodes=1, max_copies=4, drive_after_ms=SILENT_MS
        )
        await w.leader.SetDriverPolicy(pb.SetDriverPolicyRequest(policy=policy), Call())
        lost = next(n.node_id for n in w.nodes.values() if n.replicas)
        master = w.masters[w.group.leader]
        assert master.view_changes is not None
        stand_in = StandIn(w.lead, w.pool, master.scene, master.view_changes, master.node_id)
        # The lost node is silent for long, and so is each driver. A leap of the clock would excuse them.
        for _ in range(3 * SILENT_MS // STEP_MS):
            w.shift_ms += STEP_MS
            await w.beat(silent=(lost,))
        assert stand_in._silence_left_s() is None
        async with w.lead.locks.hold(tables=("driver policy",)):
            look = asyncio.create_task(stand_in._round())
            await until(lambda: stand_in._knows)
            await w.leader.GetClusterView(pb.GetClusterViewRequest(holder="operator"), Call())
        assert await look == 0.0, "it looks again at once, and makes way"
        assert not stand_in._drives and w.catalog.claim.holder == ""

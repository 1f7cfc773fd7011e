"""Has the leaders prepare the snapshot of a long scan, so that any replica can serve it.

Used by scan.py and table.py. Invariant: a tablet that was not prepared, for whatever reason, is read from its leader. Nothing
fails.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from stele.client.locations import ReplicaPlace, TabletPlace
from stele.client.tablet_scan import Prepared, ScanPlan
from stele.model.errors import NotLeader, SteleError, let_go
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.errors import error_from_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

PREPARE_AFTER_S = 0.1
"""Seconds after which a scan has its snapshot prepared. For a shorter scan it is not prepared."""
PREPARE_TIMEOUT_S = 2.0
_TABLETS_AT_ONCE = 500
_ROUNDS = 3
"""How often a tablet is asked at most. Each time after the first, another node was said to lead it."""


async def prepare(pool: ChannelPool, plan: ScanPlan, timeout_s: float = PREPARE_TIMEOUT_S) -> None:
    """Fill in `plan.prepared`: one request to each node that leads some of the plan's tablets. Tablets that
    fail are left out, so this raises nothing."""
    left = [tablet for tablet in plan.tablets if tablet.tablet_id not in plan.prepared and tablet.replicas]
    asked = {tablet.tablet_id: tablet.target() for tablet in left}
    for _ in range(_ROUNDS):
        led = defaultdict[ReplicaPlace, list[TabletPlace]](list)
        for tablet in left:
            led[asked[tablet.tablet_id]].append(tablet)
        parts = [
            (place, tablets[at : at + _TABLETS_AT_ONCE])
            for place, tablets in led.items()
            for at in range(0, len(tablets), _TABLETS_AT_ONCE)
        ]
        answers = await asyncio.gather(
            *(_ask(pool, place, part, plan.snapshot, timeout_s) for place, part in parts)
        )
        hints = {tablet_id: hint for answer in answers for tablet_id, hint in _taken(plan, answer)}
        left = [tablet for tablet in left if _moved(tablet, hints.get(tablet.tablet_id, ""), asked)]
        if not left:
            return


async def _ask(
    pool: ChannelPool, place: ReplicaPlace, tablets: Sequence[TabletPlace], snapshot: int, timeout_s: float
) -> Sequence[tserver_pb2.PreparedTabletPB]:
    """Ask a node about these tablets. The answer is empty if the node is silent, or of an earlier release."""
    request = tserver_pb2.PrepareSnapshotRequest(
        snapshot=snapshot,
        tablet_ids=[id_to_pb(tablet.tablet_id) for tablet in tablets],
        deadline_ms=int(timeout_s * 1_000),
    )
    try:
        answer = await pool.unary(
            place.address,
            TabletServerServiceStub,
            "PrepareSnapshot",
            request,
            timeout_s=timeout_s,
            to_node=place.node_id,
        )
    except SteleError as exc:
        let_go(exc)
        return ()
    found: Sequence[tserver_pb2.PreparedTabletPB] = answer.tablets
    return found


def _taken(plan: ScanPlan, answer: Sequence[tserver_pb2.PreparedTabletPB]) -> list[tuple[str, str]]:
    """Put the prepared tablets of an answer into the plan. Returns (tablet, the node that is said to lead it) of the
    others."""
    hints = []
    for each in answer:
        tablet_id = id_from_pb(each.tablet_id)
        if each.index:
            plan.prepared[tablet_id] = Prepared(each.index, each.tablet_incarnation)
        elif isinstance(error := error_from_pb(each.error), NotLeader) and error.leader_hint:
            hints.append((tablet_id, error.leader_hint))
    return hints


def _moved(tablet: TabletPlace, leader: str, asked: dict[str, ReplicaPlace]) -> bool:
    """Whether to ask about this tablet again, at another replica."""
    place = next((each for each in tablet.replicas if each.node_id == leader), None)
    if place is None or place == asked[tablet.tablet_id]:
        return False
    asked[tablet.tablet_id] = place
    return True

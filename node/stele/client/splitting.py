"""Cuts a scan into parts of about the same bytes, for parallel readers. Used by table.py.

Invariant: a row of the scan is in exactly one part. If no replica says where to cut a tablet, the tablet is one part.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

from stele.client.locations import TabletPlace
from stele.client.tablet_scan import ScanPlan
from stele.model.errors import SteleError, let_go
from stele.model.key_bounds import within
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

_AT_ONCE = 32
_TIMEOUT_S = 5.0
_BYTES_MAX = 1 << 62


async def split(pool: ChannelPool, plan: ScanPlan, part_bytes: int) -> list[ScanPlan]:
    """Return the parts of a plan, tablet by tablet, each in key order. Parts without keys for the plan's
    predicates are left out."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def of_tablet(tablet: TabletPlace) -> list[ScanPlan]:
        async with places:
            return parts(plan, tablet, await _keys(pool, tablet, part_bytes))

    found = await asyncio.gather(*(of_tablet(tablet) for tablet in plan.tablets))
    return [part for each in found for part in each]


def parts(plan: ScanPlan, tablet: TabletPlace, split_keys: Sequence[bytes]) -> list[ScanPlan]:
    """Cut one tablet of a plan at these ascending keys."""
    spec, wanted = plan.spec, plan.ranges
    prepared = (
        {tablet.tablet_id: plan.prepared[tablet.tablet_id]} if tablet.tablet_id in plan.prepared else {}
    )
    found = []
    for bounds in itertools.pairwise((b"", *split_keys, b"")):
        for lower, upper in within([bounds], spec.lower_key, spec.upper_key):
            if within(wanted, lower, upper):
                part = replace(spec, lower_key=lower, upper_key=upper)
                found.append(replace(plan, spec=part, tablets=(tablet,), prepared=prepared))
    return found


async def _keys(pool: ChannelPool, tablet: TabletPlace, part_bytes: int) -> Sequence[bytes]:
    """Ask a replica of the tablet where to cut it: the presumed leader, else another one."""
    request = tserver_pb2.SplitKeysRequest(
        tablet_id=id_to_pb(tablet.tablet_id),
        tablet_incarnation=tablet.incarnation,
        bytes=min(part_bytes, _BYTES_MAX),
    )
    for beside in range(len(tablet.replicas)):
        place = tablet.target(beside)
        try:
            answer = await pool.unary(
                place.address,
                TabletServerServiceStub,
                "SplitKeys",
                request,
                timeout_s=_TIMEOUT_S,
                to_node=place.node_id,
            )
        except SteleError as exc:
            let_go(exc)
            continue
        keys: Sequence[bytes] = answer.keys
        return keys
    return ()

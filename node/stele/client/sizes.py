"""How much the tablets of a table hold, by their leaders' present reports. For `stele table describe`.

Invariant: a tablet whose leader gives no answer is counted as unknown, never as empty.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stele.client.health import NodeHealth, TabletHealth
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

_TABLETS_AT_ONCE = 500
_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Size:
    """`rows` is an estimate: a replaced row counts until its versions are merged. `bytes_on_disk`: files of one replica
    of each tablet, without rows in memory. `unknown`: how many tablets are not counted, as their leaders gave no answer."""

    rows: int = 0
    bytes_on_disk: int = 0
    unknown: int = 0


async def size_of(
    pool: ChannelPool, tablets: Iterable[TabletHealth], known: Mapping[str, NodeHealth]
) -> Size:
    """Ask the leader of each tablet. `known`: nodes by id. Takes some seconds at most."""
    total, led = 0, defaultdict[str, list[str]](list)
    for tablet in tablets:
        total += 1
        if tablet.led and tablet.leader in known:
            led[tablet.leader].append(tablet.tablet_id)
    asked = [
        _ask(pool, known[node], ids[at : at + _TABLETS_AT_ONCE])
        for node, ids in led.items()
        for at in range(0, len(ids), _TABLETS_AT_ONCE)
    ]
    statuses = {
        status.tablet_id: status
        for answer in await asyncio.gather(*asked)
        for status in answer
        if status.has_data and status.role == common_pb2.LEADER
    }
    found = statuses.values()
    return Size(
        sum(s.rows_estimate for s in found), sum(s.bytes_on_disk for s in found), total - len(statuses)
    )


async def _ask(
    pool: ChannelPool, node: NodeHealth, tablet_ids: Sequence[str]
) -> list[common_pb2.ReplicaStatusPB]:
    """The replicas of these tablets on a node; empty if it gives no answer."""
    request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[id_to_pb(each) for each in tablet_ids])
    try:
        answer = await pool.unary(
            node.address,
            ConsensusServiceStub,
            "GetConsensusState",
            request,
            timeout_s=_ASK_TIMEOUT_S,
            to_node=node.node_id,
        )
    except SteleError:
        return []
    return list(answer.replicas)

"""Node rows follow what nodes say of themselves. Called by background.py and service.py on the leader.

Invariant: a node's first heartbeat makes it `formed`, for ever.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from stele.master.leadership import Leadership
from stele.master.liveness import NodeLife
from stele.master.port import insert, swap
from stele.master.records import NodeRecord
from stele.model.ids import NodeId
from stele.model.kvop import KeyOperation

log = structlog.get_logger("stele.master")

NODES_AT_ONCE = 256


async def record_registrations(lead: Leadership) -> None:
    """Write the rows of nodes whose registration differs from them, in one batch."""
    due = [n for n, life in lead.liveness.nodes.items() if _wanted(lead, life) is not None][:NODES_AT_ONCE]
    if due:
        await lead.do(_record(lead, due))


async def _record(lead: Leadership, node_ids: list[str]) -> None:
    async with lead.locks.hold(tables=[f"node/{n}" for n in node_ids]):
        batch: list[KeyOperation] = []
        news: list[NodeRecord] = []
        for node_id in node_ids:
            wanted = _wanted(lead, lead.liveness.nodes[node_id])
            if wanted is None:
                continue
            present = lead.catalog.nodes.get(node_id)
            batch.append(insert(wanted) if present is None else swap(present, wanted))
            if present is None or replace(present, log_synced=wanted.log_synced) != wanted:
                news.append(wanted)
        if batch := lead.fitting(batch):
            await lead.commit(batch)
        for row in news:
            if lead.catalog.nodes.get(row.node_id) == row:
                log.info("node", node=row.node_id, role=row.role, address=row.address, machine=row.machine)


def _wanted(lead: Leadership, life: NodeLife) -> NodeRecord | None:
    """The row that a node's registration asks for, None if it is there already."""
    told = life.registration
    if told is None:
        return None
    present = lead.catalog.nodes.get(life.node_id)
    if present is None:
        present = NodeRecord(NodeId(life.node_id), told.role or "node", "ACTIVE")
    elif present.state == "RETIRED":
        return None
    wanted = replace(
        present,
        formed=True,
        address=told.address,
        flight_address=told.flight_address,
        http_port=told.http_port,
        machine=told.machine,
        zone=told.zone,
        version=told.version,
    )
    if life.registered is not None and life.registered.incarnation >= present.incarnation:
        wanted = replace(wanted, **life.registered._asdict())
    return None if wanted == lead.catalog.nodes.get(life.node_id) else wanted

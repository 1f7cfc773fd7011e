"""Updates node rows from the registrations in heartbeats. Called by background.py and service.py on the
leader.

Invariant: only RegisterNode creates a row, so a heartbeat under an unknown id writes nothing. A node's first
heartbeat makes it `formed` for ever.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from stele.master.leadership import Leadership
from stele.master.liveness import NodeLife
from stele.master.port import swap
from stele.master.records import NodeRecord
from stele.model.ids import NodeId
from stele.model.kvop import KeyOperation

log = structlog.get_logger("stele.master")

NODES_AT_ONCE = 256


async def record_registrations(lead: Leadership) -> None:
    """Write, in one batch, the rows of nodes whose registration differs from the row."""
    due = [n for n, life in lead.liveness.nodes.items() if _wanted(lead, life) is not None][:NODES_AT_ONCE]
    if due:
        await lead.do(_record(lead, due))


async def _record(lead: Leadership, node_ids: list[str]) -> None:
    async with lead.locks.hold(tables=[f"node/{n}" for n in node_ids]):
        batch: list[KeyOperation] = []
        news: list[NodeRecord] = []
        for node_id in node_ids:
            life, present = lead.liveness.nodes.get(node_id), lead.catalog.nodes.get(NodeId(node_id))
            wanted = _wanted(lead, life) if life is not None else None
            if wanted is None or present is None:
                continue
            batch.append(swap(present, wanted))
            if replace(present, log_synced=wanted.log_synced) != wanted:
                news.append(wanted)
        if batch := lead.fitting(batch):
            await lead.commit(batch)
        for row in news:
            if lead.catalog.nodes.get(row.node_id) == row:
                log.info("node", node=row.node_id, role=row.role, address=row.address, machine=row.machine)


def _wanted(lead: Leadership, life: NodeLife) -> NodeRecord | None:
    """The row that a node's registration needs, or None if the row is up to date."""
    told = life.registration
    present = lead.catalog.nodes.get(NodeId(life.node_id))
    if told is None or present is None or present.state == "RETIRED":
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
        cluster_version=told.cluster_version,
    )
    if life.registered is not None and life.registered.incarnation >= present.incarnation:
        wanted = replace(wanted, **life.registered._asdict())
    return None if wanted == present else wanted

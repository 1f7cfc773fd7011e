"""Records what somebody wants of a node, and ends it when its time is over. Called by service.py and
background.py on the leader.

The wanted state is stored apart from the state that is seen. A silent node may be wanted in service, and a
live one parked. Every wanted state except RETIRED can be undone. The driver plans; this module only records
what is wanted.

Invariants: only the owner of a wanted state changes it, or an administrator who says `override`. Leaders'
monotonic clocks count its time and write it to the row each minute. So a change of leaders lengthens it by a
minute at most and never shortens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from stele.master.driving import check_epoch, commit_order
from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.master.records import ADMINISTRATOR, DRIVER, KEPT, NodeRecord
from stele.master.versions import require_version
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId
from stele.model.kvop import KeyOperation
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.master")

RECORD_MS = 60_000
"""How often the time left is written to the row."""
NODES_AT_ONCE = 256

_WANTED = {
    master_pb2.WANTED_IN_SERVICE: "IN_SERVICE",
    master_pb2.WANTED_DRAINED: "DRAINED",
    master_pb2.WANTED_PARKED: "PARKED",
    master_pb2.WANTED_FENCED: "FENCED",
    master_pb2.WANTED_RETIRED: "RETIRED",
}


async def want_node(lead: Leadership, request: master_pb2.WantNodeRequest) -> None:
    """Record what is wanted of a node. Repeating a request restarts its time.

    Raises:
        Rejected: STALE_EPOCH (epoch 0: an administrator). NOT_FOUND. INVALID_ARGUMENT, the node is RETIRED,
            somebody else asked for what is wanted now, or the time is missing or out of place.
            UNSUPPORTED_VERSION, DRAINED, PARKED or FENCED before the cluster version is finalized.
    """
    node_id = id_from_pb(request.node_id)
    wanted = _WANTED.get(request.wanted, "")
    if not wanted:
        raise Rejected(f"node {node_id[:8]}: the request does not say what is wanted")
    if wanted in KEPT and not request.for_ms:
        raise Rejected(
            f"node {node_id[:8]} is to be {wanted}: the request does not say for how long; give a time"
        )
    if request.for_ms and wanted not in (*KEPT, "DRAINED"):
        raise Rejected(
            f"node {node_id[:8]} cannot be {wanted} for a limited time; only PARKED, FENCED and DRAINED can; give no time"
        )
    async with lead.locks.hold(tables=(f"node/{node_id}",)):
        if request.epoch:
            check_epoch(lead, request.epoch)
        node = lead.catalog.nodes.get(node_id)
        if node is None:
            raise Rejected(
                f"there is no node with the id {node_id[:8]}; `stele node list` shows all",
                code=Code.NOT_FOUND,
            )
        if wanted == "FENCED" and node.role == "master":
            # A fenced master could not vote, and fencing can only be ended through the catalog.
            raise Rejected(f"{node.name or node_id[:8]} is a master; only nodes can be fenced")
        owner = DRIVER if request.epoch else ADMINISTRATOR
        _check_owner(node, owner, request.override)
        if wanted in (*KEPT, "DRAINED"):
            require_version(lead, 2, f"node {node.name or node_id[:8]} is to be {wanted}")
        changed = _changed(node, wanted, owner, request.reason, request.for_ms)
        now_ms = lead.now_ms()
        if changed != node:
            await commit_order(lead, request.epoch, [swap(node, changed)])
            log.info(
                "the wanted state of a node changed",
                node=node_id,
                wanted=wanted,
                by=owner,
                reason=request.reason,
            )
        lead.wanted_since_ms[node_id] = now_ms


def _check_owner(node: NodeRecord, owner: str, override: bool) -> None:
    name = node.name or node.node_id
    if node.state == "RETIRED":
        raise Rejected(f"node {name} is RETIRED, which is final; a new node needs a new id")
    if node.asked_by in ("", owner) or (override and owner == ADMINISTRATOR):
        return
    asked = f"node {name} is to be {node.asked} ({node.reason or 'no reason was given'})"
    if owner == DRIVER:
        raise Rejected(f"{asked} because an administrator asked for it; a driver may not change that")
    raise Rejected(
        f"{asked} because the driver asked for it; change what the driver acts on, such as spec.nodes of the "
        f"TabletCluster, or override it"
    )


def _changed(node: NodeRecord, wanted: str, owner: str, reason: str, for_ms: int) -> NodeRecord:
    """The node's row after the request. A node that was given up as silent counts as wanted in service
    already.
    """
    if wanted == "IN_SERVICE":
        if node.asked == "IN_SERVICE":
            return node
        return replace(node, state="ACTIVE", wanted="", owner="", reason=reason, left_ms=0)
    state = "ACTIVE" if wanted in KEPT else "DRAINING"
    return replace(
        node, state=state, given_up=False, wanted=wanted, owner=owner, reason=reason, left_ms=for_ms
    )


async def keep_time(lead: Leadership) -> None:
    """End the wanted states whose time is over. Each minute, write down the time that the others have left."""
    due = [n.node_id for n in lead.catalog.nodes.values() if n.left_ms and _is_due(lead, n)]
    if due:
        await lead.do(_write_time(lead, due[:NODES_AT_ONCE]))


def _is_due(lead: Leadership, node: NodeRecord) -> bool:
    left_ms = lead.left_ms(node)
    return not left_ms or node.left_ms - left_ms >= RECORD_MS


async def _write_time(lead: Leadership, node_ids: Sequence[NodeId]) -> None:
    async with lead.locks.hold(tables=[f"node/{n}" for n in node_ids]):
        now_ms = lead.now_ms()
        batch: list[KeyOperation] = []
        written: list[NodeRecord] = []
        for node_id in node_ids:
            node = lead.catalog.nodes.get(node_id)
            if node is None or not node.left_ms:
                continue
            left_ms = lead.left_ms(node)
            changed = replace(node, left_ms=left_ms)
            if not left_ms:
                changed = replace(changed, wanted="", owner="")
            if not left_ms and node.asked in (*KEPT, "DRAINED"):
                changed = replace(changed, state="ACTIVE", reason=f"the time of {node.asked} is over")
            batch.append(swap(node, changed))
            written.append(changed)
        if batch := lead.fitting(batch):
            await lead.commit(batch)
        for node in written:
            if lead.catalog.nodes.get(node.node_id) != node:
                continue  # the catalog had no room for it
            lead.wanted_since_ms[node.node_id] = now_ms
            if not node.left_ms:
                log.info(
                    "the wanted state of a node ended",
                    node=node.node_id,
                    wanted="IN_SERVICE",
                    reason=node.reason,
                )

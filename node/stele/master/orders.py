"""Orders to nodes: create a replica, tombstone it, delete it. Sent again until a report shows that it was done.

Called by background.py. Remembers only when each order was last sent. Invariant: a replica is taken away only if its
tablet is gone for good, or a newer committed configuration omits it and no intent names it; unknown ones are kept.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import structlog

from stele import metrics
from stele.master.leadership import Leadership
from stele.master.liveness import Report
from stele.master.records import TabletRecord
from stele.model.errors import Code, SteleError
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb
from stele.rpc.convert_schema import partition_to_pb, partitioning_to_pb, schema_to_pb
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub

log = structlog.get_logger("stele.master")

ORDERS_AT_ONCE = 32
ORDER_TIMEOUT_S = 10.0

Fate = Literal["keep", "tombstone", "delete"]


def fate_of(lead: Leadership, row: TabletRecord | None, report: Report) -> Fate:
    """What is to become of a reported replica (DESIGN "Deleting a replica")."""
    status = report.status
    if row is None:
        return "keep"
    if row.state in ("DELETED", "REPLACED"):
        return "keep" if status.data_state == common_pb2.DELETED else "delete"
    if status.data_state in (common_pb2.TOMBSTONED, common_pb2.DELETED):
        return "keep"
    if row.state != "RUNNING" or row.config.peer(status.replica_id) is not None:
        return "keep"
    intent = lead.catalog.intents.get(row.tablet_id)
    if intent is not None and intent.replica_id == status.replica_id:
        return "keep"
    told = max(status.committed_config.opid_index, status.pending_config.opid_index)
    if status.replica_id >= row.next_replica_id or told > row.config.opid_index:
        return "keep"  # it knows more than the catalog does
    return "tombstone"


class Orders:
    """Gives a leadership's orders."""

    def __init__(self, lead: Leadership, pool: ChannelPool) -> None:
        self._lead = lead
        self._pool = pool
        self._gate = asyncio.Semaphore(ORDERS_AT_ONCE)
        self._sent_ms: dict[tuple[str, str, int], int] = {}
        self._running: set[asyncio.Task[None]] = set()

    def consider(self, row: TabletRecord) -> None:
        """Send what is due for one tablet."""
        lead = self._lead
        if row.state in ("CREATING", "RUNNING") and row.config.opid_index == -1:
            # Later a first replica would start from a configuration that was never its first: the driver copies it.
            for peer in row.config.peers:
                if peer.replica_id in row.uncreated:
                    self._send("create", row, peer.node_id, peer.replica_id)
        for report in lead.liveness.reports_of(row.tablet_id):
            fate = fate_of(lead, row, report)
            if fate != "keep":
                self._send(fate, row, report.node_id, report.status.replica_id)

    def _send(self, what: str, row: TabletRecord, node_id: str, replica_id: int) -> None:
        key = (row.tablet_id, node_id, replica_id)
        now = self._lead.now_ms()
        if now - self._sent_ms.get(key, -(1 << 60)) < self._lead.options.order_retry_ms:
            return
        node = self._lead.catalog.nodes.get(node_id)
        if node is None or not node.address or not self._lead.is_alive(node):
            return  # its next heartbeat makes the order due
        self._sent_ms[key] = now
        create = what == "create"
        method = "CreateTablet" if create else "DeleteTablet"
        request = self._create_request(row) if create else self._delete_request(what, row, replica_id)
        task = asyncio.get_running_loop().create_task(self._call(key, node.address, node_id, method, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _call(
        self, key: tuple[str, str, int], address: str, node_id: str, method: str, request: Any
    ) -> None:
        lead = self._lead
        async with self._gate:
            if lead.ended:
                return
            try:
                await self._pool.unary(
                    address,
                    TabletServerAdminServiceStub,
                    method,
                    request,
                    timeout_s=ORDER_TIMEOUT_S,
                    to_node=node_id,
                )
            except SteleError as exc:
                metrics.master_orders.labels(method, exc.code.name).inc()
                log.info("order not done", order=method, tablet=key[0], node=node_id, error=str(exc))
            else:
                metrics.master_orders.labels(method, Code.OK.name).inc()
                log.info("order done", order=method, tablet=key[0], node=node_id, replica=key[2])
            finally:
                self._sent_ms[key] = lead.now_ms()

    def _create_request(self, row: TabletRecord) -> tserver_pb2.CreateTabletRequest:
        table = self._lead.catalog.tables[row.table_id]
        request = tserver_pb2.CreateTabletRequest(
            tablet_id=id_to_pb(row.tablet_id),
            table_id=id_to_pb(row.table_id),
            table_name=table.name,
            partitioning=partitioning_to_pb(PartitionSchema.from_json(table.partitioning)),
            partition=partition_to_pb(row.partition),
            config=config_to_pb(row.config),
            leader_hint=id_to_pb(row.leader),
            catalog_opid=opid_to_pb(self._lead.order_opid),
            tablet_incarnation=row.incarnation,
            kind=table.kind,
        )
        if table.schema:
            request.schema.CopyFrom(schema_to_pb(Schema.from_json(table.schema)))
        return request

    def _delete_request(
        self, what: str, row: TabletRecord, replica_id: int
    ) -> tserver_pb2.DeleteTabletRequest:
        gone = what == "delete"
        reason = f"tablet is {row.state}" if gone else f"configuration {row.config.opid_index} omits it"
        return tserver_pb2.DeleteTabletRequest(
            tablet_id=id_to_pb(row.tablet_id),
            replica_id=replica_id,
            target=common_pb2.DELETED if gone else common_pb2.TOMBSTONED,
            cas_config_opid_index_less_or_equal=row.config.opid_index,
            catalog_opid=opid_to_pb(self._lead.order_opid),
            reason=reason,
        )

    async def close(self) -> None:
        """Stop sending; what is under way is cut off."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

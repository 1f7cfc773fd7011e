"""Orders to nodes: create a replica, alter a tablet, make a survivor its only voter, tombstone a replica,
delete it. Repeated until a report shows that the order was done.

Called by background.py. Remembers only which orders are under way, and when recent ones were sent. Each node
has its own queue, with at most one order for each replica. Invariant: a replica is removed in three cases
only. Its tablet is deleted. Or a newer committed configuration omits it, and no intent names it. Or the
tablet was recovered as a higher incarnation, and the survivor leads in it. Replicas of unknown tablets are
kept.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

import structlog

from stele import metrics
from stele.master.altering import leader_to_alter
from stele.master.leadership import Leadership
from stele.master.liveness import Report, is_given_up
from stele.master.records import TabletRecord
from stele.model.errors import Code, SteleError
from stele.model.incarnation import is_newer
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_from_pb, id_to_pb, opid_to_pb
from stele.rpc.convert_schema import partition_to_pb, partitioning_to_pb, schema_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub

log = structlog.get_logger("stele.master")

ORDERS_AT_ONCE = 32
ORDERS_PER_NODE = 4
"""The most calls at once to one node. It is below the total, so that a node that does not answer cannot take
up all calls.
"""
ORDER_TIMEOUT_S = 10.0
WHICHEVER_REPLICA = 0
"""The replica_id in an order that means any replica of the tablet on the node."""

Request = (
    tserver_pb2.CreateTabletRequest
    | tserver_pb2.AlterTabletRequest
    | tserver_pb2.DeleteTabletRequest
    | consensus_pb2.UnsafeChangeConfigRequest
)
Fate = Literal["keep", "tombstone", "delete"]


class Order(NamedTuple):
    """An order to a node. `what`: create, alter, recover, tombstone or delete."""

    what: str
    node_id: str
    replica_id: int


def fate_of(lead: Leadership, row: TabletRecord | None, report: Report) -> Fate:
    """Decide what to do with a reported replica, by the module's invariant."""
    status = report.status
    if row is None:
        return "keep"
    if row.state in ("DELETED", "REPLACED"):
        return "keep" if status.data_state == common_pb2.DELETED else "delete"
    if status.data_state in (common_pb2.TOMBSTONED, common_pb2.DELETED):
        return "keep"
    if row.state != "RUNNING" or row.config.names(status.replica_id, report.node_id):
        return "keep"
    intent = lead.catalog.intents.get(row.tablet_id)
    if intent is not None and (intent.replica_id, intent.target_node) == (
        status.replica_id,
        report.node_id,
    ):
        return "keep"
    if _being_added(lead, row, report):
        return "keep"
    if is_given_up(status, row.incarnation):
        # While the survivor is not known to lead alone, the other replicas may hold the only other copy of
        # the rows.
        return "keep" if survivor_waits(lead, row) else "tombstone"
    # Its pending configuration does not matter. The row's configuration is committed and omits it, and ids
    # are never used again. A replica that is being added has an intent until a committed configuration names
    # it or fences it off.
    told = status.committed_config
    if status.replica_id >= row.next_replica_id or is_newer(
        (told.incarnation, told.opid_index), row.config.version
    ):
        return "keep"  # it knows a newer configuration than the catalog
    return "tombstone"


def survivor_waits(lead: Leadership, row: TabletRecord) -> bool:
    """Whether the survivor of a recovery has not yet reported that it is the tablet's only voter."""
    done = lead.catalog.recoveries.get(row.tablet_id)
    if done is None or done.incarnation != row.incarnation:
        return False
    return row.config.version <= (done.incarnation, done.last_logged.index)


def _being_added(lead: Leadership, row: TabletRecord, report: Report) -> bool:
    """Whether the leader has proposed a configuration with this replica. A change by an administrator has no
    intent.
    """
    _, leader = lead.liveness.leader_of(row.tablet_id)
    return any(
        (peer.replica_id, id_from_pb(peer.node_id)) == (report.replica_id, report.node_id)
        for r in lead.liveness.reports_of(row.tablet_id)
        if r.node_id == leader and r.status.role == common_pb2.LEADER
        for peer in r.status.pending_config.peers
    )


class Orders:
    """The orders of one leadership."""

    def __init__(self, lead: Leadership, pool: ChannelPool) -> None:
        self._lead = lead
        self._pool = pool
        self._gate = asyncio.Semaphore(ORDERS_AT_ONCE)
        self._gates: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(ORDERS_PER_NODE))
        self._under_way: set[tuple[str, str, int]] = set()
        self._sent_ms: dict[tuple[str, str, int], int] = {}
        self._running: set[asyncio.Task[None]] = set()

    def under_way(self) -> set[str]:
        """The tablets about which orders wait or are being carried out."""
        return {tablet_id for tablet_id, _, _ in self._under_way}

    def __len__(self) -> int:
        return len(self._sent_ms)

    def forget_old(self) -> None:
        """Forget orders that ended so long ago that they may be sent again."""
        before = self._lead.now_ms() - self._lead.options.order_retry_ms
        for key in [key for key, sent_ms in self._sent_ms.items() if sent_ms <= before]:
            del self._sent_ms[key]

    def consider(self, row: TabletRecord) -> bool:
        """Send the orders that are due for one tablet.

        Returns whether any are due, including those that were sent lately.
        """
        due = list(self._due(row))
        for order in due:
            self._send(row, order)
        return bool(due)

    def _due(self, row: TabletRecord) -> Iterator[Order]:
        if row.state in ("CREATING", "RUNNING") and row.config.opid_index == -1:
            # Only the first configuration can start a replica empty. Later ones need a copy, which the driver
            # makes.
            for peer in row.config.peers:
                if peer.replica_id in row.uncreated:
                    yield Order("create", peer.node_id, peer.replica_id)
        if (stale := leader_to_alter(self._lead, row)) is not None:
            yield Order("alter", stale.node_id, stale.replica_id)
        if row.state == "RUNNING" and survivor_waits(self._lead, row):
            (peer,) = row.config.peers
            yield Order("recover", peer.node_id, peer.replica_id)
        left = self._lead.removals.nodes_left(row.tablet_id)
        for node_id in sorted(left):
            yield Order("delete", node_id, WHICHEVER_REPLICA)
        for report in self._lead.liveness.all_reports_of(row.tablet_id):
            fate = fate_of(self._lead, row, report)
            if fate != "keep" and report.node_id not in left:
                yield Order(fate, report.node_id, report.replica_id)

    def _send(self, row: TabletRecord, order: Order) -> None:
        key = (row.tablet_id, order.node_id, order.replica_id)
        now = self._lead.now_ms()
        if (
            key in self._under_way
            or now - self._sent_ms.get(key, -(1 << 60)) < self._lead.options.order_retry_ms
        ):
            return
        if not self._address_of(order.node_id):
            return  # its next heartbeat makes the order due
        self._under_way.add(key)
        task = asyncio.get_running_loop().create_task(self._wait_and_call(key, order))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _address_of(self, node_id: str) -> str:
        """The address of a node that may get orders; "" if it may not."""
        node = self._lead.catalog.nodes.get(node_id)
        if node is None or not self._lead.is_alive(node):
            return ""
        return self._lead.liveness.located(node).address

    async def _wait_and_call(self, key: tuple[str, str, int], order: Order) -> None:
        try:
            async with self._gates[order.node_id], self._gate:
                # The row may have changed while the order waited.
                row = self._lead.catalog.tablets.get(key[0])
                address = self._address_of(order.node_id)
                if address and row is not None and not self._lead.ended and order in self._due(row):
                    await self._call(row, order, address)
        finally:
            self._under_way.discard(key)
            self._sent_ms[key] = self._lead.now_ms()

    async def _call(self, row: TabletRecord, order: Order, address: str) -> None:
        request: Request
        stub: type = TabletServerAdminServiceStub
        match order.what:
            case "recover":
                method, request = "UnsafeChangeConfig", self._recover_request(row, order)
                stub = ConsensusServiceStub
            case "create":
                method, request = "CreateTablet", self._create_request(row)
            case "alter":
                method, request = "AlterTablet", self._alter_request(row)
            case _:
                method, request = "DeleteTablet", self._delete_request(row, order)
        try:
            await self._pool.unary(
                address,
                stub,
                method,
                request,
                timeout_s=ORDER_TIMEOUT_S,
                to_node=order.node_id,
            )
        except SteleError as exc:
            metrics.master_orders.labels(method, exc.code.name).inc()
            log.info(
                "order failed; it is sent again",
                order=method,
                tablet=row.tablet_id,
                node=order.node_id,
                error=str(exc),
            )
        else:
            metrics.master_orders.labels(method, Code.OK.name).inc()
            if order.what == "delete" and order.replica_id == WHICHEVER_REPLICA:
                self._lead.removals.done(row.tablet_id, order.node_id)
            log.info(
                "order done",
                order=method,
                tablet=row.tablet_id,
                node=order.node_id,
                replica=order.replica_id,
            )

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

    def _alter_request(self, row: TabletRecord) -> tserver_pb2.AlterTabletRequest:
        table = self._lead.catalog.tables[row.table_id]
        return tserver_pb2.AlterTabletRequest(
            tablet_id=id_to_pb(row.tablet_id),
            schema=schema_to_pb(Schema.from_json(table.schema)),
            catalog_opid=opid_to_pb(self._lead.order_opid),
            tablet_incarnation=row.incarnation,
        )

    def _recover_request(self, row: TabletRecord, order: Order) -> consensus_pb2.UnsafeChangeConfigRequest:
        done = self._lead.catalog.recoveries[row.tablet_id]
        return consensus_pb2.UnsafeChangeConfigRequest(
            tablet_id=id_to_pb(row.tablet_id),
            replica_id=order.replica_id,
            tablet_incarnation=done.incarnation,
            term=done.term,
            at_least=opid_to_pb(done.last_logged),
            catalog_opid=opid_to_pb(self._lead.order_opid),
            reason=f"recovery by {done.owner or 'an administrator'}: {done.reason or 'no reason was given'}",
        )

    def _delete_request(self, row: TabletRecord, order: Order) -> tserver_pb2.DeleteTabletRequest:
        gone = order.what == "delete"
        reason = f"tablet is {row.state}" if gone else f"configuration {row.config.opid_index} omits it"
        return tserver_pb2.DeleteTabletRequest(
            tablet_id=id_to_pb(row.tablet_id),
            replica_id=order.replica_id,
            target=common_pb2.DELETED if gone else common_pb2.TOMBSTONED,
            cas_config_opid_index_less_or_equal=row.config.opid_index,
            catalog_opid=opid_to_pb(self._lead.order_opid),
            reason=reason,
            tablet_incarnation=row.incarnation,
        )

    async def close(self) -> None:
        """Stop sending orders, and cancel those under way."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

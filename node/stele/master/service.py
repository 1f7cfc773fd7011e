"""MasterService over gRPC. Parses requests, calls the right part of the master, answers; decides nothing
itself.

Raises SteleErrors; the server's guard turns them into statuses. Invariant: a master that does not lead
answers only heartbeats, ListMasters, and reads that allow staleness.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

from stele import metrics
from stele.driver.wire import copy_record_to_pb
from stele.master import (
    altering,
    comparing,
    counting,
    departed,
    driving,
    dropping,
    recovering,
    replicas,
    standing_in,
    tables,
    wanted,
)
from stele.master import by_hand as by_hands
from stele.master.cluster_view import (
    Scene,
    by_hand_to_pb,
    claim_to_pb,
    cluster_view,
    intent_to_pb,
    masters_of,
    recovery_to_pb,
    table_info,
    tablet_locations,
)
from stele.master.heartbeat_bounds import bound_heartbeat
from stele.master.liveness import LastStart, NodeLife, refuse_older
from stele.master.master import Master
from stele.master.versions import finalize, refuse_earlier
from stele.model.errors import Code, NotLeader, Rejected, Retryable, StartRefused, SteleError
from stele.model.ids import NodeId
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Caller, PeerBook, caller_from_metadata
from stele.rpc.logging import OncePer
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer

log = structlog.get_logger("stele.master")

T = TypeVar("T")
ConfirmFormation = Callable[[pb.ConfirmFormationRequest], Awaitable[None]]


def _ensure_own(caller: Caller, node_id: str, incarnation: int | None = None) -> None:
    """Raise WRONG_NODE if the caller is not this start of this node."""
    if caller.from_node != node_id or incarnation not in (None, caller.from_incarnation):
        who = f"node {caller.from_node}" if caller.from_node else "a caller that is not a node"
        raise Rejected(
            f"{who} sent a request for node {node_id[:8]}; a node may only send its own", code=Code.WRONG_NODE
        )


async def _done_already(what: str, waiting: Awaitable[T]) -> T:
    """Wait for nodes, after a change is on record.

    Raises:
        Retryable: UNKNOWN_OUTCOME, another master leads now. NOT_LEADER would wrongly say that nothing was
            done.
    """
    try:
        return await waiting
    except NotLeader as exc:
        raise Retryable(
            f"{what}, but another master leads now, and this one cannot say which nodes know it; repeat the request",
            code=Code.UNKNOWN_OUTCOME,
        ) from exc


class MasterService(MasterServiceServicer):
    """Answers MasterService. `confirm` writes the formation of a first master to its volume and lets it vote.
    `book`: this process's address book.
    """

    def __init__(self, master: Master, confirm: ConfirmFormation, book: PeerBook) -> None:
        self._master = master
        self._confirm = confirm
        self._book = book
        self._once = OncePer()

    # --- nodes ---

    async def TSHeartbeat(self, request: pb.TSHeartbeatRequest, context: Any) -> pb.TSHeartbeatResponse:
        """Record a node's liveness. The leader also takes its reports; only the leader's answer acknowledges
        them.

        Every master records the addresses of its callers. Masters call each other by host name. So after all
        masters restarted under new addresses, they find each other before there is a leader. Configurations
        have only the old addresses.

        Raises:
            StartRefused: an earlier start, a start on an older copy of the volume, or one beside another that
                runs.
            Rejected: WRONG_NODE, it names another node than the caller. NOT_FOUND, the node is not
                registered.
            Retryable: THROTTLED, there are too many unregistered nodes.
        """
        master = self._master
        caller = caller_from_metadata(context.invocation_metadata())
        _ensure_own(caller, id_from_pb(request.node_id), request.incarnation)
        answer = pb.TSHeartbeatResponse(term=master.log.term, node_id=id_to_pb(master.node_id))
        beyond = await bound_heartbeat(request)
        if beyond:
            event, who = "some replica statuses are too large and were dropped", caller.from_node
            self._once.tell(log.warning, event, who, "status", node=who, replicas=beyond)
        try:
            self._refuse_older(request, self._scene())
            await master.starts.ensure_gone(request)
            scene = self._scene()
            life = self._hear(request, scene)
        except Rejected as exc:
            raise self._refusal(exc, id_from_pb(request.node_id)) from None
        lead = master.lead
        metrics.master_heartbeats.inc()
        if request.vetted:
            master.starts.prove(life)
        if life.registration is not None:
            self._book.told(life.node_id, life.incarnation, life.registration.address)
        answer.needs_reregister = life.registration is None
        master.tell_clocks(answer)
        if scene is None:
            return answer
        answer.masters.extend(masters_of(scene))
        answer.driver_epoch = scene.catalog.claim.epoch
        node = scene.catalog.nodes.get(life.node_id)
        if node is not None:
            answer.node_state = pb.NodeStatePB.Value(node.state)
        if lead is None or not self._leads():
            return answer
        for tablet_id in await master.liveness.merge(request, master.now_ms()):
            lead.look_at(tablet_id)
        if master.lead is not lead or not self._leads():
            return answer  # other tasks ran meanwhile
        answer.is_leader, answer.term = True, lead.term
        answer.cluster_version = scene.catalog.cluster_version
        answer.fenced = node is not None and node.asked == "FENCED"
        answer.needs_full_report = not life.full
        addresses, answer.addresses_digest = master.liveness.addresses()
        if answer.addresses_digest != request.addresses_digest:
            answer.addresses.extend(addresses)
        answer.dropped_digest, answer.catalog_index = scene.catalog.withdrawn_digest, scene.catalog.opid.index
        if answer.dropped_digest != request.dropped_digest:
            answer.dropped_tables.extend(id_to_pb(table_id) for table_id in scene.catalog.withdrawn)
        if request.HasField("registration"):
            lead.wake.set()
        return answer

    def _scene(self) -> Scene | None:
        """The sources of an answer; None while this master has no catalog."""
        try:
            return self._master.scene()
        except SteleError:
            return None

    def _hear(self, request: pb.TSHeartbeatRequest, scene: Scene | None) -> NodeLife:
        """Record that a node is alive.

        A leader accepts only registered nodes. Another master may lack rows; after a restart it lacks all. So
        it also accepts a bounded number of unknown nodes, because starting masters find each other only by
        heartbeats.
        """
        liveness, node_id = self._master.liveness, NodeId(id_from_pb(request.node_id))
        nodes = scene.catalog.nodes if scene is not None else {}
        row = nodes.get(node_id)
        if self._leads():
            if row is None:
                raise Rejected(
                    f"node {node_id[:8]} is not registered; it must call RegisterNode first",
                    code=Code.NOT_FOUND,
                )
            if len(liveness.nodes) > len(nodes):
                liveness.forget_strangers(nodes)
        if scene is not None:
            refuse_earlier(scene.catalog, request)
        self._refuse_older(request, scene)
        return liveness.heard(request, self._master.now_ms(), on_record=row is not None)

    def _refuse_older(self, request: pb.TSHeartbeatRequest, scene: Scene | None) -> None:
        """Refuse a start as `liveness.refuse_older` does, by the catalog's row of the node."""
        row = scene.catalog.nodes.get(NodeId(id_from_pb(request.node_id))) if scene is not None else None
        if row is not None:
            refuse_older(request, LastStart(row.incarnation, row.start, row.log_synced))

    def _leads(self) -> bool:
        master = self._master
        return master.lead is not None and not master.lead.ended and master.log.is_leader

    def _refusal(self, why: Rejected, node_id: str) -> Rejected:
        """The refusal of a start, with the details by which its node compares the answers of several masters."""
        if why.code not in (Code.STALE_INCARNATION, Code.VOLUME_OLD):
            return why
        master, scene = self._master, self._scene()
        row = scene.catalog.nodes.get(NodeId(node_id)) if scene is not None else None
        life = master.liveness.nodes.get(node_id)
        return StartRefused(
            str(why.args[0]),
            code=why.code,
            master=master.node_id,
            masters=len(scene.catalog_config.peers) if scene is not None else 0,
            newest=max(
                row.incarnation if row is not None else 0, life.incarnation if life is not None else 0
            ),
        )

    async def RegisterNode(self, request: pb.RegisterNodeRequest, context: Any) -> pb.RegisterNodeResponse:
        """Register a node's UUID. The caller is the node itself, or the program that creates it."""
        caller = caller_from_metadata(context.invocation_metadata())
        if caller.from_node:
            _ensure_own(caller, id_from_pb(request.node_id))
        lead = await self._master.confirmed_lead()
        return pb.RegisterNodeResponse(formed=await lead.do(driving.register_node(lead, request)))

    async def SetNodeState(self, request: pb.SetNodeStateRequest, context: Any) -> pb.SetNodeStateResponse:
        """Set a node's state: ACTIVE, DRAINING or RETIRED."""
        lead = await self._master.confirmed_lead()
        if request.forget:
            await lead.do(departed.forget_node(lead, id_from_pb(request.node_id), request.reason))
        else:
            await lead.do(driving.set_node_state(lead, request))
        return pb.SetNodeStateResponse()

    async def WantNode(self, request: pb.WantNodeRequest, context: Any) -> pb.WantNodeResponse:
        """Record what an administrator or a driver wants of a node."""
        lead = await self._master.confirmed_lead()
        await lead.do(wanted.want_node(lead, request))
        return pb.WantNodeResponse()

    async def KeepLeader(self, request: pb.KeepLeaderRequest, context: Any) -> pb.KeepLeaderResponse:
        """Have drivers leave the leader of a tablet where it is, for a time."""
        lead = await self._master.confirmed_lead()
        await lead.do(driving.keep_leader(lead, request))
        return pb.KeepLeaderResponse()

    # --- tables ---

    async def CreateTable(self, request: pb.CreateTableRequest, context: Any) -> pb.CreateTableResponse:
        """Create a table in one batch. Its tablets are placed afterwards."""
        lead = await self._master.confirmed_lead()
        return await lead.do(tables.create_table(lead, request))

    async def AlterTable(self, request: pb.AlterTableRequest, context: Any) -> pb.AlterTableResponse:
        """Change a table's columns, ranges or name in one batch. Its tablets follow afterwards."""
        lead = await self._master.confirmed_lead()
        table = await lead.do(altering.alter_table(lead, request))
        version = Schema.from_json(table.schema).version if table.schema else 0
        waiting = tables.wait_for_deletion(lead, table.table_id, request.wait_ms)
        unreached, left = await _done_already(f"{table.name} is altered", waiting)
        return pb.AlterTableResponse(
            table_id=id_to_pb(table.table_id),
            schema_version=version,
            unreached=unreached,
            tablets_left=left,
        )

    async def DeleteTable(self, request: pb.DeleteTableRequest, context: Any) -> pb.DeleteTableResponse:
        """Delete a table in one batch. Then wait for the nodes to delete its replicas, as long as the
        caller allows."""
        lead = await self._master.confirmed_lead()
        table_id = await lead.do(tables.delete_table(lead, id_from_pb(request.table_id), request.name))
        waiting = tables.wait_for_deletion(lead, table_id, request.wait_ms)
        unreached, left = await _done_already(f"table {table_id[:8]} is deleted", waiting)
        return pb.DeleteTableResponse(unreached=unreached, tablets_left=left)

    async def DropTable(self, request: pb.DropTableRequest, context: Any) -> pb.DropTableResponse:
        """Take a table out of service so that it can be recalled. Then wait until no node serves it any more."""
        lead = await self._master.confirmed_lead()
        table = await lead.do(dropping.drop_table(lead, request))
        waiting = dropping.wait_for_nodes(lead, table.table_id, request.wait_ms)
        unreached = await _done_already(f"{table.name} is dropped", waiting)
        return pb.DropTableResponse(table=table_info(self._master.scene(), table), unreached=unreached)

    async def RecallTable(self, request: pb.RecallTableRequest, context: Any) -> pb.RecallTableResponse:
        """Bring a dropped table back. Then wait until the nodes serve it."""
        lead = await self._master.confirmed_lead()
        table = await lead.do(dropping.recall_table(lead, request))
        waiting = dropping.wait_for_nodes(lead, table.table_id, request.wait_ms, silent=False)
        unreached = await _done_already(f"{table.name} is recalled", waiting)
        return pb.RecallTableResponse(table=table_info(self._master.scene(), table), unreached=unreached)

    async def SetKeepDropped(
        self, request: pb.SetKeepDroppedRequest, context: Any
    ) -> pb.SetKeepDroppedResponse:
        """Set how long dropped tables can be recalled."""
        lead = await self._master.confirmed_lead()
        return pb.SetKeepDroppedResponse(before_ms=await lead.do(dropping.set_keep_dropped(lead, request)))

    async def SetReplicationFactor(
        self, request: pb.SetReplicationFactorRequest, context: Any
    ) -> pb.SetReplicationFactorResponse:
        """Set the replication factor of a table. Its replicas follow."""
        lead = await self._master.confirmed_lead()
        table = await lead.do(replicas.set_replication_factor(lead, request))
        return pb.SetReplicationFactorResponse(table=table_info(self._master.scene(), table))

    async def SetMasterCount(
        self, request: pb.SetMasterCountRequest, context: Any
    ) -> pb.SetMasterCountResponse:
        """Set the number of masters. A driver adds or removes them."""
        lead = await self._master.confirmed_lead()
        return pb.SetMasterCountResponse(before=await lead.do(counting.set_master_count(lead, request)))

    async def RecoverTablet(self, request: pb.RecoverTabletRequest, context: Any) -> pb.RecoverTabletResponse:
        """Give up what a tablet's lost majority had, and let one survivor continue alone."""
        lead = await self._master.confirmed_lead()
        done = await lead.do(recovering.recover_tablet(lead, request))
        return pb.RecoverTabletResponse(recovery=recovery_to_pb(done))

    async def PlaceTablet(self, request: pb.PlaceTabletRequest, context: Any) -> pb.PlaceTabletResponse:
        """Record what an administrator asks of a tablet's replicas."""
        lead = await self._master.confirmed_lead()
        by_hand = await lead.do(by_hands.place_tablet(lead, request))
        return pb.PlaceTabletResponse(by_hand=by_hand_to_pb(by_hand))

    async def ListTables(self, request: pb.ListTablesRequest, context: Any) -> pb.ListTablesResponse:
        """All tables by id; dropped and removed ones only if the request asks for them."""
        await self._master.confirmed_lead()
        scene = self._master.scene()
        found = scene.catalog.live_tables
        if request.include_removed:
            found = sorted(scene.catalog.tables.values(), key=lambda t: t.table_id)
        cluster = scene.catalog.cluster
        return pb.ListTablesResponse(
            tables=[table_info(scene, t) for t in found],
            keep_dropped_ms=cluster.keep_dropped_ms if cluster is not None else 0,
        )

    async def GetTable(self, request: pb.GetTableRequest, context: Any) -> pb.GetTableResponse:
        """A table by id or name."""
        await self._master.confirmed_lead()
        scene = self._master.scene()
        table = scene.catalog.table(id_from_pb(request.table_id), request.name)
        return pb.GetTableResponse(table=table_info(scene, table))

    async def GetTableLocations(
        self, request: pb.GetTableLocationsRequest, context: Any
    ) -> pb.GetTableLocationsResponse:
        """The locations of a table's current tablets, by ordinal. Raises NOT_FOUND for a dropped table."""
        await self._master.confirmed_lead()
        scene = self._master.scene()
        table = scene.catalog.table(id_from_pb(request.table_id), request.name)
        if table.state == "DROPPED":
            tables.check_there(table)
        rows = scene.catalog.current_tablets(table.table_id)
        return pb.GetTableLocationsResponse(
            table=table_info(scene, table),
            tablets=[tablet_locations(scene, r) for r in rows],
            ttl_ms=scene.options.locations_ttl_ms,
            cluster_version=scene.catalog.cluster_version,
        )

    async def GetTabletLocations(
        self, request: pb.GetTabletLocationsRequest, context: Any
    ) -> pb.GetTabletLocationsResponse:
        """The locations of the requested tablets. Raises NOT_FOUND if one of them is unknown."""
        await self._master.confirmed_lead()
        scene = self._master.scene()
        rows = [scene.catalog.tablet(id_from_pb(t)) for t in request.tablet_ids]
        return pb.GetTabletLocationsResponse(tablets=[tablet_locations(scene, r) for r in rows])

    # --- masters, drivers ---

    async def ListMasters(self, request: pb.ListMastersRequest, context: Any) -> pb.ListMastersResponse:
        """The masters, as far as this master knows. Any master answers."""
        scene = self._master.scene()
        return pb.ListMastersResponse(
            masters=masters_of(scene), leader=id_to_pb(scene.leader), term=scene.term
        )

    async def GetClusterView(
        self, request: pb.GetClusterViewRequest, context: Any
    ) -> pb.GetClusterViewResponse:
        """The cluster view from the leader. If the caller names a place, the next page of changes after it;
        else all.

        A follower answers with the whole view, if its rows are no older than the caller allows.
        """
        master = self._master
        if request.holder and master.lead is not None:
            master.lead.hear_driver(request.holder)
        in_pages = request.HasField("since")
        old_ms = request.max_staleness_ms
        if in_pages or not old_ms or not await master.log.fresh(old_ms):
            # A replaced leader that does not know it would show nodes as silent that only it cannot hear.
            lead = await master.confirmed_lead()
            if (changes := master.view_changes) is not None:
                if in_pages:
                    found = await changes.page(request.since, master.cluster_id)
                else:
                    found = await changes.whole(master.cluster_id)
                lead.check()
                return found
        return cluster_view(master.scene(), master.cluster_id)

    async def ClaimDriver(self, request: pb.ClaimDriverRequest, context: Any) -> pb.ClaimDriverResponse:
        """Take, renew or release the claim."""
        lead = await self._master.confirmed_lead()
        lead.hear_driver(request.holder)
        return pb.ClaimDriverResponse(claim=claim_to_pb(await lead.do(driving.claim_driver(lead, request))))

    async def SetDriverPolicy(
        self, request: pb.SetDriverPolicyRequest, context: Any
    ) -> pb.SetDriverPolicyResponse:
        """Set the policy by which the leading master drives while no driver is heard."""
        lead = await self._master.confirmed_lead()
        await lead.do(standing_in.set_policy(lead, request.policy, request.epoch))
        return pb.SetDriverPolicyResponse()

    async def FinalizeClusterVersion(
        self, request: pb.FinalizeClusterVersionRequest, context: Any
    ) -> pb.FinalizeClusterVersionResponse:
        """Finalize a cluster version, and so allow what members of an earlier version cannot read."""
        lead = await self._master.confirmed_lead()
        version = await lead.do(finalize(lead, request))
        return pb.FinalizeClusterVersionResponse(cluster_version=version)

    async def BeginIntent(self, request: pb.BeginIntentRequest, context: Any) -> pb.BeginIntentResponse:
        """Begin or take over an intent."""
        lead = await self._master.confirmed_lead()
        return pb.BeginIntentResponse(intent=intent_to_pb(await lead.do(driving.begin_intent(lead, request))))

    async def EndIntent(self, request: pb.EndIntentRequest, context: Any) -> pb.EndIntentResponse:
        """End an intent, with the configuration that decides it."""
        lead = await self._master.confirmed_lead()
        await lead.do(driving.end_intent(lead, request))
        return pb.EndIntentResponse()

    async def RecordCheck(self, request: pb.RecordCheckRequest, context: Any) -> pb.RecordCheckResponse:
        """Record how a replica that a heal or a move made compared with another voter."""
        lead = await self._master.confirmed_lead()
        record = await lead.do(comparing.record_check(lead, request))
        return pb.RecordCheckResponse(copy=copy_record_to_pb(record))

    async def ConfirmFormation(
        self, request: pb.ConfirmFormationRequest, context: Any
    ) -> pb.ConfirmFormationResponse:
        """Confirm the formation of the cluster to a first master, once all have formatted their volumes."""
        await self._confirm(request)
        return pb.ConfirmFormationResponse()

"""The operator's calls to the masters. Called by observe and act; owns the connections of one cluster.

Invariant: every call carries the cluster's UUID and fork id. If an address now belongs to another cluster, or
to another copy of this one, the call is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stele.driver.asking import ask_nodes
from stele.driver.copy_checks import CopyCheck
from stele.driver.executor import MASTERS_ROUNDS, MASTERS_TIMEOUT_S, Executor
from stele.driver.keeping import Kept, ViewKeeper, pages_of
from stele.driver.policy import StandingPolicy
from stele.driver.versions import versions_of
from stele.driver.view import ClusterView, TabletView
from stele.driver.wire import standing_from_pb, standing_to_pb
from stele.model.clock import physical_us
from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import CATALOG_TABLET_ID, ClusterId, TabletId, new_id
from stele.model.ranges import RangeStep
from stele.model.steps import Step
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.errand_holds import HoldSeen
from stele_operator.plan.observation import Catalog, Column, MasterReport, Table, TableRanges
from stele_operator.plan.ranges import ranges_of
from stele_operator.plan.rules import history_ms
from stele_operator.plan.steady import Steady

_ASK_TIMEOUT_S = 2.0
_ASK_AT_ONCE = 32
_HOLDS_NOTHING = frozenset((Code.UNSUPPORTED_VERSION, Code.INVALID_ARGUMENT, Code.TABLET_DELETED))
"""Codes with which tablets without holds refuse the question: key spaces, dropped ranges."""


class MasterLink:
    """Connections to the masters of one cluster, and the driver of this cluster. It may be closed and rebuilt
    at any time.
    """

    def __init__(self, cluster_id: str, holder: str, fork_id: str = "") -> None:
        self.cluster_id, self.fork_id = cluster_id, fork_id
        self._pool = ChannelPool(Identity(cluster_id=ClusterId(cluster_id), fork_id=fork_id))
        self._masters = Masters(
            self._pool, (), first_contact_s=None, timeout_s=MASTERS_TIMEOUT_S, rounds=MASTERS_ROUNDS
        )
        self._holder = holder
        self.at_work = False
        """Whether the operator may heal this cluster. If not, the masters heal it after a time."""
        self._keeper = ViewKeeper()
        self._steady = Steady()
        self._tables: dict[bytes, tuple[master_pb2.TableInfoPB, Table]] = {}
        """Each table by its id: as the masters sent it, and as converted."""
        self._compared: list[CopyCheck] = []
        self.driver = Executor(
            self._pool, (), holder=holder, keeper=self._keeper, on_copy=self._compared.append
        )
        self._formed: dict[tuple[str, int], MasterReport] = {}
        self._view: ClusterView | None = None
        """The newest view."""

    async def close(self) -> None:
        """Release the driver's claim and close the connections."""
        await self.driver.close()
        await self._pool.close()

    async def rest(self, may_drive: bool) -> bool:
        """Called when nothing is to be healed or moved. If the operator may drive, it compares newly copied
        replicas with other voters. Otherwise, or when no replica is being compared, it releases the claim.
        Returns whether a replica is being compared.
        """
        if not may_drive:
            await self.driver.close()
            return False
        if self._view is not None:
            await self.driver.compare_copies(self._view)
        if not self.driver.checks.busy:
            await self.driver.release()
        return self.driver.checks.busy

    def copies_compared(self) -> list[CopyCheck]:
        """The results of comparisons of replicas since the last call."""
        found = list(self._compared)
        self._compared.clear()
        return found

    def learn(self, addresses: Sequence[str]) -> None:
        """Set the present addresses of the masters."""
        self._masters.learn(addresses)
        self.driver.masters.learn(addresses)

    async def reports(self, addresses: Mapping[tuple[str, int], str]) -> tuple[MasterReport, ...]:
        """What each master answers about itself. Masters that do not answer are left out.

        `addresses`: by pod uid and restart count. The answer of a formed master is cached until its process
        ends.
        """
        self._formed = {run: report for run, report in self._formed.items() if run in addresses}
        asked = [run for run in addresses if run not in self._formed]
        answers = await asyncio.gather(*(self._report(addresses[run]) for run in asked))
        found = {run: report for run, report in zip(asked, answers, strict=True) if report is not None}
        self._formed |= {run: report for run, report in found.items() if report.formed}
        return tuple({**found, **self._formed}.values())

    async def _report(self, address: str) -> MasterReport | None:
        request = tserver_pb2.GetNodeStatusRequest()
        try:
            answer = await self._pool.unary(
                address, TabletServerServiceStub, "GetNodeStatus", request, timeout_s=_ASK_TIMEOUT_S
            )
        except SteleError:
            return None
        return MasterReport(
            node_id=id_from_pb(answer.node_id),
            cluster_id=id_from_pb(answer.cluster_id),
            address=answer.address or address,
            format_id=answer.format_id,
            formed=answer.formed,
        )

    async def catalog(self) -> Catalog:
        """The cluster as the leading master sees it.

        Raises:
            SteleError: no master leads, or none answers.
        """
        # With its name the operator tells the masters that it is at work, so that they leave healing to it.
        pages = pages_of(self._masters, self._holder if self.at_work else "", rounds=1)
        return await asyncio.to_thread(self._catalog, await self._keeper.renew(pages))

    def _catalog(self, kept: Kept) -> Catalog:
        self._view = kept.view
        last, versions, before = kept.last, versions_of(kept.last), self._tables
        self._tables = {
            pb.table_id: found if (found := before.get(pb.table_id)) and found[0] is pb else (pb, _table(pb))
            for pb in kept.tables
        }
        return Catalog(
            view=kept.view,
            tables=tuple(table for _, table in self._tables.values()),
            formed_nodes=frozenset(id_from_pb(n.node_id) for n in last.nodes if n.formed),
            names={id_from_pb(n.node_id): n.name for n in last.nodes if n.name},
            standing=standing_from_pb(last.policy) if last.HasField("policy") else None,
            finalized=versions.finalized,
            readable=versions.possible,
            lagging={m.label: m.reads for m in versions.lagging},
            steady=self._steady,
        )

    async def with_sizes(self, catalog: Catalog) -> Catalog:
        """The catalog with the present sizes of all tablets, as the leaders' nodes report them."""
        asked: dict[str, list[TabletId]] = {}
        for tablet in catalog.view.tablets:
            if tablet.state == "RUNNING" and tablet.leader_node:
                asked.setdefault(tablet.leader_node, []).append(tablet.tablet_id)
        return replace(catalog, view=await ask_nodes(self._pool, catalog.view, asked))

    async def holds(self) -> tuple[dict[str, HoldSeen], int] | None:
        """All holds on the history of tables, by name, and how many tablets were asked. None if a tablet did
        not answer.
        """
        if self._view is None:
            return None
        view, free = self._view, asyncio.Semaphore(_ASK_AT_ONCE)
        tablets = [
            t
            for t in view.tablets
            if t.tablet_id != CATALOG_TABLET_ID and t.is_current and not t.of_dropped_table
        ]

        async def ask(tablet: TabletView) -> Sequence[tserver_pb2.HoldPB] | None:
            leader = view.node(tablet.leader_node) if tablet.leader_node else None
            if leader is None or not leader.address:
                return None
            request = tserver_pb2.HoldHistoryRequest(
                tablet_id=id_to_pb(tablet.tablet_id),
                tablet_incarnation=tablet.config.incarnation,
                deadline_ms=round(_ASK_TIMEOUT_S * 1_000),
            )
            async with free:
                try:
                    answer = await self._pool.unary(
                        leader.address,
                        TabletServerServiceStub,
                        "HoldHistory",
                        request,
                        timeout_s=_ASK_TIMEOUT_S,
                        to_node=leader.node_id,
                    )
                except SteleError as exc:
                    return () if exc.code in _HOLDS_NOTHING else None
            return tuple(answer.holds)

        answers = await asyncio.gather(*(ask(tablet) for tablet in tablets))
        found: dict[str, HoldSeen] = {}
        for tablet, answer in zip(tablets, answers, strict=True):
            if answer is None:
                return None
            for hold in answer:
                found[hold.name] = _with_tablet(found.get(hold.name), hold, tablet.replication_factor)
        return found, len(tablets)

    async def register(self, node_id: str, role: str, name: str) -> None:
        """Register a node before its pod starts."""
        request = master_pb2.RegisterNodeRequest(node_id=id_to_pb(node_id), role=role, name=name)
        await self._masters.call("RegisterNode", request)

    async def confirm(self, address: str, node_id: str, masters: Sequence[tuple[str, str, str]]) -> None:
        """Tell a first master which masters form the cluster."""
        request = master_pb2.ConfirmFormationRequest(
            cluster_id=id_to_pb(self.cluster_id),
            masters=[
                master_pb2.FirstMasterPB(node_id=id_to_pb(n), format_id=f, address=a) for n, f, a in masters
            ],
        )
        await self._pool.unary(
            address, MasterServiceStub, "ConfirmFormation", request, timeout_s=5.0, to_node=node_id
        )

    async def set_policy(self, policy: StandingPolicy) -> None:
        """Store in the catalog the policy by which the masters heal while the operator is away.

        Raises:
            Rejected: STALE_EPOCH, the driver's claim was lost, so the policy came from an old view. The next
                pass plans again.
        """
        claim = self.driver.claim
        request = master_pb2.SetDriverPolicyRequest(
            policy=standing_to_pb(policy), epoch=claim.epoch if claim is not None else 0
        )
        try:
            await self._masters.call("SetDriverPolicy", request)
        except Rejected as exc:
            if exc.code is Code.STALE_EPOCH:
                self.driver.claim = None
            raise
        if policy.held:  # that ended the claim
            self.driver.claim = None

    async def set_master_count(self, masters: int) -> None:
        """Set the number of masters, as the driver. It changes nothing if the number is the present one."""
        claim = await self.driver.ensure_claim()
        request = master_pb2.SetMasterCountRequest(masters=masters, epoch=claim.epoch)
        await self._masters.call("SetMasterCount", request)

    async def finalize_version(self, version: int) -> None:
        """Finalize a cluster version. It changes nothing if the version is finalized already."""
        request = master_pb2.FinalizeClusterVersionRequest(cluster_version=version)
        await self._masters.call("FinalizeClusterVersion", request)

    async def create_table(self, table_id: str, name: str, spec: TabletGroupSpec) -> None:
        """Create a table with the caller's id. If the table exists, it counts as created."""
        ids = {column.name: position for position, column in enumerate(spec.columns)}
        schema = common_pb2.SchemaPB(
            version=1,
            columns=[
                common_pb2.ColumnPB(id=ids[c.name], name=c.name, type=c.type, nullable=c.nullable)
                for c in spec.columns
            ],
            key_column_ids=[ids[k] for k in spec.primaryKey],
            next_column_id=len(ids),
            history_ms=history_ms(spec) or 0,
        )
        partitioning = common_pb2.PartitioningPB(
            hash=[
                common_pb2.HashPartitionPB(column_ids=[ids[c] for c in level.columns], buckets=level.buckets)
                for level in spec.partitioning.hash
            ]
        )
        if ranges := ranges_of(spec, ids):
            from stele.model.partition import PartitionSchema
            from stele.rpc.convert_schema import partitioning_to_pb

            partitioning.range.CopyFrom(partitioning_to_pb(PartitionSchema((), ranges)).range)
        request = master_pb2.CreateTableRequest(
            name=name,
            schema=schema,
            partitioning=partitioning,
            replication_factor=spec.replicationFactor,
            table_id=id_to_pb(table_id),
            owner=spec.owner or "",
            comment=spec.comment or "",
        )
        await self._masters.call("CreateTable", request)

    async def set_replication_factor(self, table_id: str, factor: int) -> None:
        """Set a table's replication factor. It changes nothing if the factor is the present one."""
        request = master_pb2.SetReplicationFactorRequest(
            table_id=id_to_pb(table_id), replication_factor=factor
        )
        await self._masters.call("SetReplicationFactor", request)

    async def alter_table(
        self, table_id: str, steps: Sequence[Step | RangeStep], notes: Mapping[str, str]
    ) -> None:
        """Change a table's columns, ranges, history and `notes` (owner and comment, by name).

        Each call has an id of its own. So a request that is sent twice changes the table once.
        """
        from stele.rpc.convert_schema import steps_to_pb

        alter_id = id_to_pb(new_id())
        made = master_pb2.AlterTableRequest(
            table_id=id_to_pb(table_id), steps=steps_to_pb(steps), alter_id=alter_id
        )
        for name, note in notes.items():
            setattr(made, name, note)
        await self._masters.call("AlterTable", made)

    async def delete_table(self, table_id: str, *, kept: bool) -> None:
        """Drop a table. `kept`: it can be recalled for as long as the cluster keeps dropped tables; otherwise
        it is deleted for good. A table that is gone counts as dropped.
        """
        try:
            if kept:
                dropped = master_pb2.DropTableRequest(table_id=id_to_pb(table_id), drop_id=id_to_pb(new_id()))
                await self._masters.call("DropTable", dropped)
            else:
                request = master_pb2.DeleteTableRequest(table_id=id_to_pb(table_id))
                await self._masters.call("DeleteTable", request)
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise


def _with_tablet(before: HoldSeen | None, hold: tserver_pb2.HoldPB, replicas: int) -> HoldSeen:
    """A hold with the report of one more tablet added: bytes summed, times narrowed."""
    mine = HoldSeen(hold.bytes * replicas, physical_us(hold.since) / 1e6, hold.expires_us / 1e6, hold.broken)
    if before is None:
        return mine
    return HoldSeen(
        before.bytes + mine.bytes,
        max(before.since_s, mine.since_s),
        min(before.until_s, mine.until_s),
        before.broken or mine.broken,
    )


def _table(pb: master_pb2.TableInfoPB) -> Table:
    names = {c.id: c.name for c in pb.schema.columns}
    ranges = None
    if pb.partitioning.range.column_ids:
        # Imported late: with its libraries it takes 50 MB, which a cluster without such tables need not have.
        from stele.rpc.convert_schema import partitioning_from_pb

        if (ranged := partitioning_from_pb(pb.partitioning).range) is not None:
            columns = tuple(names.get(i, f"#{i}") for i in ranged.column_ids)
            ranges = TableRanges(columns, tuple((start, end) for start, end, _ in ranged.covered))
    return Table(
        table_id=id_from_pb(pb.table_id),
        name=pb.name,
        state=pb.state,
        columns=tuple(Column(c.name, c.type, c.nullable) for c in pb.schema.columns),
        primary_key=tuple(names.get(i, f"#{i}") for i in pb.schema.key_column_ids),
        hash=tuple(
            (tuple(names.get(i, f"#{i}") for i in level.column_ids), level.buckets)
            for level in pb.partitioning.hash
        ),
        range=ranges,
        replication_factor=pb.replication_factor,
        tablets=pb.tablets,
        replication_factor_before=pb.replication_factor_before,
        owner=pb.owner,
        comment=pb.comment,
        history_ms=pb.schema.history_ms,
    )

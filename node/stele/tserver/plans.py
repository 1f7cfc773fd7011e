"""Plans of scans for Flight clients: of whole tables as the masters describe them, of single tablets as this node has them.

Every node and master answers. It asks the leading master as a client does, so it keeps nothing that could be old.
Invariant: all tickets of a plan are for one snapshot and one schema version, and name their cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stele.consensus.ports import InThread
from stele.consensus.replica import Replica
from stele.model.bounds import HISTORY_DEFAULT_MS
from stele.model.clock import from_physical_us, snapshot_for
from stele.model.errors import Code, Rejected, Retryable
from stele.model.key_bounds import key_ranges, within
from stele.model.nearest import in_any_case
from stele.model.partition import PartitionSchema, numbered, prune
from stele.model.partitioning import HashPartitioning, Partitioning, by_names
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.model.where import parse_where
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.convert_schema import partition_from_pb, partitioning_from_pb, schema_from_pb
from stele.rpc.flight_plan import Endpoint, Planned
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, master_pb2
from stele.rpc.ticket import ScanCommand, Ticket
from stele.tserver.description import NodeDescription
from stele.tserver.plan_questions import PlanQuestions
from stele.tserver.replicas import Replicas
from stele.tserver.scan import table_of
from stele.tserver.table_actions import TableActions

PLAN_TIMEOUT_S = 10.0
_WAIT_MS, _PREPARED_WAIT_MS = 5_000, 1_000
"""How long a replica may wait until it can serve the snapshot. For a prepared one the wait is shorter, since
another replica may serve it earlier.
"""
_PLAN_BYTES_MAX = 8 << 20
"""The most bytes of all tickets. Each ticket repeats the conditions, and one answer holds all tickets."""
_GONE = ("REPLACED", "DELETED")


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The request of a command, and the tablets that can hold the wanted rows."""

    schema: Schema
    partitioning: PartitionSchema
    spec: ScanSpec
    snapshot: int
    tablets: list[master_pb2.TabletLocationsPB]


class Plans:
    """Answers GetFlightInfo and DoAction for a node. `addresses()`: those of the masters that the node knows."""

    def __init__(
        self,
        description: NodeDescription,
        replicas: Replicas,
        addresses: Callable[[], Iterable[str]],
        in_thread: InThread,
    ) -> None:
        self._description = description
        self._replicas = replicas
        self._addresses = addresses
        self._in_thread = in_thread
        identity = description.identity
        # It asks as a client, so its questions take no place that is kept for nodes.
        self._pool = ChannelPool(Identity(identity.cluster_id, fork_id=identity.fork_id))
        self._masters = Masters(self._pool, (), first_contact_s=None, timeout_s=PLAN_TIMEOUT_S - 1)
        self._actions = TableActions(self._ask)
        self._questions = PlanQuestions(self._pool)

    async def close(self) -> None:
        """Ask the masters nothing more."""
        await self._pool.close()

    async def plan(self, command: ScanCommand) -> Planned:
        """The plan of a scan of a table, or of one tablet of this node.

        Raises:
            Rejected: NOT_FOUND. SCHEMA_MISMATCH, there is no such column. INVALID_ARGUMENT.
            Retryable: the table is being created, or no master leads.
        """
        if command.tablet_id:
            return await self._of_tablet(command)
        answer = await self._actions.locations(command.table)
        chosen = await self._in_thread(self._choose, answer, command)
        there = [pb for pb in answer.tablets if pb.state not in _GONE]
        prepared, cuts, (rows, size) = await asyncio.gather(
            self._questions.prepare(chosen.tablets if command.prepare else (), chosen.snapshot),
            self._questions.split_keys(chosen.tablets if command.part_bytes else (), command.part_bytes),
            self._questions.sizes(there if command.statistics else None),
        )
        planned = await self._in_thread(self._planned, answer.table, chosen, command, prepared, cuts)
        return replace(planned, rows=rows, bytes=size)

    async def act(self, name: str, body: bytes) -> bytes:
        """Carry out an action on tables (table_actions.py)."""
        return await self._actions.act(name, body)

    # --- whole tables

    async def _ask(self, method: str, request: Any) -> Any:
        self._masters.learn(self._addresses())
        return await self._masters.call(method, request)

    def _choose(self, answer: master_pb2.GetTableLocationsResponse, command: ScanCommand) -> _Chosen:
        """Find what the command asks for, and the tablets that can hold it. Called in a thread, because
        conditions may be long and tablets many.
        """
        info = answer.table
        schema, partitioning = schema_from_pb(info.schema), partitioning_from_pb(info.partitioning)
        predicates = _predicates(command.where, schema)
        spec = ScanSpec(
            column_ids=_column_ids(command.columns, schema),
            predicates=predicates,
            limit=command.limit,
            ordered=command.resumable,
        )
        snapshot = command.snapshot or int(from_physical_us(time.time_ns() // 1_000))
        if command.max_staleness_ms is not None:
            snapshot = snapshot_for(_staleness_us(command.max_staleness_ms, info.name, schema), snapshot)
        ordinals = {part: n for n, part in numbered(partitioning)}
        there = {
            ordinals.get(partition_from_pb(pb.partition), -1): pb
            for pb in answer.tablets
            if pb.state not in _GONE
        }
        wanted = prune(partitioning, schema, predicates)
        if not there.keys() >= set(ordinals.values()):
            raise Retryable(
                f"table {info.name}: only {len(there)} of {partitioning.tablets} tablets exist so far; try again",
                code=Code.NOT_READY,
            )
        size = len(spec.to_json(schema))
        if size * len(wanted) > _PLAN_BYTES_MAX:
            raise Rejected(
                f"table {info.name}: the plan would have {len(wanted)} tickets of {size} bytes; "
                "name fewer values in the conditions",
                code=Code.TOO_LARGE,
            )
        return _Chosen(schema, partitioning, spec, snapshot, [there[n] for n in wanted])

    def _planned(
        self,
        info: master_pb2.TableInfoPB,
        chosen: _Chosen,
        command: ScanCommand,
        prepared: Mapping[bytes, int],
        cuts: Mapping[bytes, Sequence[bytes]],
    ) -> Planned:
        """Make the plan with its tickets. Called in a thread."""
        identity, schema, spec = self._description.identity, chosen.schema, chosen.spec
        scans = [
            (pb, part) for pb in chosen.tablets for part in parts(spec, schema, cuts.get(pb.tablet_id, ()))
        ]
        whole = spec.to_json(schema)
        if len(whole) * len(scans) > _PLAN_BYTES_MAX:  # each part repeats the conditions
            scans = [(pb, spec) for pb in chosen.tablets]
        endpoints = [
            Endpoint(
                Ticket(
                    cluster_id=identity.cluster_id,
                    tablet_id=id_from_pb(pb.tablet_id),
                    snapshot=chosen.snapshot,
                    schema_version=schema.version,
                    scan=whole if part is spec else part.to_json(schema),
                    wait_ms=_PREPARED_WAIT_MS if pb.tablet_id in prepared else _WAIT_MS,
                    fork_id=identity.fork_id,
                    incarnation=pb.tablet_incarnation,
                    prepared=prepared.get(pb.tablet_id, 0),
                    resumable=command.resumable,
                    any_replica=command.max_staleness_ms is not None,
                ),
                _flight_addresses(pb, followers_first=command.max_staleness_ms is not None),
            )
            for pb, part in scans
        ]
        about = {
            "cluster": identity.cluster_id,
            "table": info.name,
            "table_id": id_from_pb(info.table_id),
            "snapshot": chosen.snapshot,
            "columns": [[c.name, c.type, c.nullable, c.default_text()] for c in schema.columns],
            "key": [c.name for c in schema.key_columns],
            "partitioning": [_part(part) for part in by_names(chosen.partitioning, schema)],
            "replication_factor": info.replication_factor,
            "owner": info.owner,
            "comment": info.comment,
            "history_s": (schema.history_ms or HISTORY_DEFAULT_MS) // 1_000,
            "zones": {r.flight_address: r.zone for pb in chosen.tablets for r in pb.replicas if r.zone},
        }
        return Planned(schema.to_arrow(spec.column_ids), endpoints, about=about)

    # --- one tablet

    async def _of_tablet(self, command: ScanCommand) -> Planned:
        known = ScanCommand(tablet_id=command.tablet_id, columns=command.columns, snapshot=command.snapshot)
        if command != known:
            raise Rejected("a plan of one tablet takes columns and snapshot only; name the table instead")
        identity = self._description.identity
        replica: Replica = self._replicas.for_client(command.tablet_id)
        schema = table_of(replica).schema
        snapshot = command.snapshot or int(await replica.reads.latest_snapshot())
        # All columns by id: the table may have more columns when the ticket is used.
        column_ids = _column_ids(command.columns, schema)
        ticket = Ticket(
            cluster_id=identity.cluster_id,
            tablet_id=command.tablet_id,
            snapshot=snapshot,
            schema_version=schema.version,
            scan=ScanSpec(column_ids=column_ids).to_json(schema),
            fork_id=identity.fork_id,
            incarnation=replica.superblock.tablet_incarnation,
        )
        here = (self._description.flight_address,)
        return Planned(schema.to_arrow(column_ids), [Endpoint(ticket, here)])


def parts(spec: ScanSpec, schema: Schema, cuts: Sequence[bytes]) -> list[ScanSpec]:
    """Cut the scan of a tablet at these ascending keys. Returns a scan for each part that can hold wanted
    rows.
    """
    if not cuts:
        return [spec]
    wanted = key_ranges(schema.key_column_ids, schema, spec.predicates)
    bounds = itertools.pairwise((b"", *cuts, b""))
    return [
        replace(spec, lower_key=lower, upper_key=upper)
        for lower, upper in bounds
        if within(wanted, lower, upper)
    ]


def _column_ids(names: Sequence[str], schema: Schema) -> tuple[int, ...]:
    """The ids of these columns, or of all columns if none is named. Names may be in any case."""
    found = [in_any_case(name, schema.by_name) for name in names]
    unknown = [name for name, known in zip(names, found) if known is None]
    if unknown:
        raise Rejected(
            f"the table has no column {', '.join(unknown[:5])}; it has {', '.join(schema.by_name)}",
            code=Code.SCHEMA_MISMATCH,
        )
    if len(set(found)) < len(found):
        raise Rejected("a column is named twice; name each once")
    return tuple(int(schema.by_name[name].id) for name in found if name is not None) or schema.column_ids


def _predicates(where: str, schema: Schema) -> tuple[Predicate, ...]:
    if not where:
        return ()
    return tuple(
        Predicate(int(schema.by_name[name].id), op, value) for name, op, value in parse_where(where, schema)
    )


def _part(part: Partitioning) -> dict[str, Any]:
    if isinstance(part, HashPartitioning):
        return {"kind": "hash", "columns": list(part.columns), "buckets": part.buckets}
    return {"kind": "range", "columns": list(part.columns)}


def _staleness_us(max_staleness_ms: int, name: str, schema: Schema) -> int:
    """A staleness in microseconds.

    Raises:
        Rejected: it is longer than the table's history.
    """
    history_ms = schema.history_ms or HISTORY_DEFAULT_MS
    if max_staleness_ms > history_ms:
        raise Rejected(
            f"max_staleness_ms of {max_staleness_ms}: table {name} keeps {history_ms} ms of history; give at most that"
        )
    return 1_000 * max_staleness_ms


def _flight_addresses(pb: master_pb2.TabletLocationsPB, *, followers_first: bool) -> tuple[str, ...]:
    """Flight addresses of the replicas that have rows to serve. The leader's comes first, or last with
    `followers_first`.
    """
    voters = [r for r in pb.replicas if r.peer.member_type == common_pb2.VOTER and r.flight_address]
    voters.sort(key=lambda r: ((r.role != common_pb2.LEADER) != followers_first, not r.alive))
    return tuple(r.flight_address for r in voters)

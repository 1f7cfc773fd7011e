"""TabletServerService: writes, point reads and key space operations over client streams; checksums and status by unary calls.

Parses requests at the edge and hands them to replicas. Invariant: only what was validated is proposed, and
every request gets a result or a SteleError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from stele import metrics
from stele.consensus.ports import InThread
from stele.consensus.replica import Replica
from stele.model import writeop
from stele.model.block import version_told
from stele.model.clock import utc
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.ids import CATALOG_TABLET_ID, NodeId
from stele.model.job import Attempt
from stele.model.kvop import (
    LEASE_MAX,
    LEASES_VERSION,
    KeyOp,
    KeyOperation,
    decode_write,
    encode_operations,
    grant,
    revoke,
)
from stele.model.writeop import BodyKind, WriteHeader
from stele.rpc.client_stream import WRITE_DEADLINE_MS, Answers, ClientStreams, Sink
from stele.rpc.convert import id_from_pb, opid_to_pb
from stele.rpc.errors import RETRY_AFTER_MS_MAX, error_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceServicer
from stele.tablet.machine import Outcome, StateMachine
from stele.tserver.gate import require_version
from stele.tserver.holds import hold_history
from stele.tserver.leader_load import LeaderLoad, write_units
from stele.tserver.leases import LeaseKeeper, check_ttl
from stele.tserver.reads import (
    check_incarnation,
    check_tablet,
    checksum,
    fresh_since,
    key_space_of,
    point_read,
    refuse_newer,
    store_of,
)
from stele.tserver.replicas import Replicas
from stele.tserver.reports import all_reports
from stele.tserver.wall_clock import WallClock
from stele.tserver.watching import Watches

PREPARED_MAX = 1_000
"""The most tablets of one request to prepare a snapshot."""
_KV_OPS = {pb.KV_REPLACE: KeyOp.REPLACE, pb.KV_INSERT: KeyOp.INSERT, pb.KV_DELETE: KeyOp.DELETE}


class TabletService(TabletServerServiceServicer):
    """Served by every node and master.

    `in_read_thread` does a point read, `status` describes the node. `cluster_version`: the finalized one; 0:
    not heard yet. `make_streams(answers)` makes the handler of clients' streams. This class answers their
    requests, as `stele.rpc.client_stream.Answers`.
    """

    def __init__(
        self,
        node_id: NodeId,
        replicas: Replicas,
        wall_clock: WallClock,
        load: LeaderLoad,
        *,
        in_read_thread: InThread,
        status: Callable[[], pb.GetNodeStatusResponse],
        cluster_version: Callable[[], int],
        watches: Watches,
        leases: LeaseKeeper,
        make_streams: Callable[[Answers], ClientStreams],
    ) -> None:
        self._node_id = node_id
        self._replicas = replicas
        self._wall_clock = wall_clock
        self._load = load
        self._in_read_thread = in_read_thread
        self._status = status
        self._cluster_version = cluster_version
        self._watches = watches
        self._leases = leases
        self._streams = make_streams(self)

    # --- stele.rpc.client_stream.Answers

    async def answer(self, request: pb.ClientRequest) -> pb.ClientResponse:
        """Answer a request of a client stream that is no write."""
        match request.WhichOneof("body"):
            case "read":
                return pb.ClientResponse(read=await self._read(request.read))
            case "kv":
                return pb.ClientResponse(kv=await self._kv(request.kv))
            case other:
                raise Rejected(f"client request of kind {other}; expected write, read or kv")

    async def watch(self, request: pb.KvWatchRequest, sink: Sink) -> pb.KvWatchResponse:
        """Begin a watch on keys, or stop it."""
        return await self._watches.begin(request, sink)

    def begin_write(self, request: pb.WriteRequest) -> asyncio.Future[Outcome]:
        """Propose a block."""
        replica = self._replicas.of_request(request.tablet_id)
        check_tablet(replica, "table", request.tablet_incarnation)
        replica.check_leader()
        block = request.block
        machine = store_of(replica)
        client_id = _client_id(request.client_id)
        made_with = version_told(block)
        refuse_newer(machine, made_with)
        try:
            plain = machine.check_block(block)
        except Rejected:
            # A retry of a write that was applied before the schema changed gets the outcome of that write.
            if not 0 < made_with < machine.schema.version or not machine.may_know(
                client_id, request.sequence, request.first_attempt_us
            ):
                raise
            plain = False
        header = WriteHeader(
            client_id=client_id,
            sequence=request.sequence,
            lowest_unfinished=request.lowest_unfinished,
            first_attempt_us=request.first_attempt_us,
            digest=_check_digest(block, request.digest),
            schema_version=machine.schema.version,
            plain=plain,
            attempt=attempt_of(request),
        )
        new_job = header.attempt is not None and not machine.knows_job(header.attempt.job)
        if header.attempt is not None and new_job:
            self._check_made("the job", header.attempt.made_us, replica)
        early = _early(request.durability)
        is_new = self._admit(replica, header)
        future = replica.writes.submit(writeop.encode(header, block), rows_only=True, early=early)
        self._load.add(replica, write_units(len(block)))
        if is_new or new_job:
            _expect(machine, header, future)
        return early or future

    def end_write(self, outcome: Outcome) -> pb.WriteResponse:
        """Make the answer to a write with this outcome."""
        if (error := outcome.error()) is not None:
            raise error
        response = pb.WriteResponse(timestamp=outcome.timestamp)
        if outcome.in_memory:
            response.durability = pb.MEMORY
            metrics.writes_in_memory.cell()[0] += 1
        for each in outcome.row_errors:
            response.row_errors.add(row=each.row, code=int(each.code), message=each.message)
        return response

    async def _read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        """Read rows by whole key, at a snapshot or at the latest one."""
        replica = self._replicas.of_request(request.tablet_id)
        check_tablet(replica, "table", request.tablet_incarnation)
        refuse_newer(store_of(replica), request.schema_version)
        until = asyncio.get_running_loop().time() + (request.deadline_ms or WRITE_DEADLINE_MS) / 1000
        since_us = replica.host.steady_us()
        if request.snapshot:
            ask = replica.following.holds if request.any_replica else None
            await replica.reads.snapshot_ready(request.snapshot, request.deadline_ms, ask=ask)
            snapshot = int(request.snapshot)
        elif request.any_replica and not replica.is_leader:
            since_us = await fresh_since(replica, request)
            snapshot = store_of(replica).last_timestamp
        else:
            snapshot = int(await replica.reads.latest_snapshot(request.deadline_ms))
        newest = store_of(replica).last_timestamp
        rows, places = await point_read(
            replica,
            request.keys,
            list(request.column_ids),
            snapshot,
            in_thread=self._in_read_thread,
            until=until,
        )
        if replica.is_leader:
            self._load.add(replica, write_units(len(rows)) + len(places))
        response = pb.ReadResponse(rows=rows, snapshot=snapshot, places=places, newest=newest)
        if request.any_replica and not request.snapshot:
            response.age_us = max(0, replica.host.steady_us() - since_us)
        return response

    async def _kv(self, request: pb.KvRequest) -> pb.KvResponse:
        """Carry out one operation on a key space."""
        replica = self._replicas.of_request(request.tablet_id)
        check_tablet(replica, "keyspace", request.tablet_incarnation)
        if request.op in (pb.KV_READ, pb.KV_LIST):
            since_us = replica.host.steady_us()
            if request.any_replica and not replica.is_leader:
                since_us = await fresh_since(replica, request)
            else:
                await replica.reads.linearizable_read(request.deadline_ms)
            machine = key_space_of(replica)
            if request.op == pb.KV_LIST:
                pairs = machine.list(request.key)
            else:
                value = machine.read(request.key)
                pairs = [] if value is None else [(request.key, value)]
            if replica.is_leader:
                self._load.add(replica, write_units(sum(len(k) + len(v) for k, v in pairs)))
            changed_at, lease_of = machine.changed_at, machine.lease_of
            return pb.KvResponse(
                pairs=[
                    pb.KvPairPB(key=k, value=v, revision=changed_at(k), lease=lease_of(k)) for k, v in pairs
                ],
                revision=machine.revision,
                newest=machine.last_timestamp,
                age_us=max(0, replica.host.steady_us() - since_us) if request.any_replica else 0,
            )
        if request.op in (pb.KV_LEASE_KEEP, pb.KV_LEASES):
            return await self._leases.answer(replica, request)
        if replica.tablet_id == CATALOG_TABLET_ID:
            raise Rejected(
                "the catalog is written by the masters alone; use MasterService", code=Code.PERMISSION_DENIED
            )
        operations = operations_of(request)
        if request.lease or any(operation.lease for operation in operations):
            require_version(self._cluster_version(), LEASES_VERSION, "a lease of a key space")
        replica.check_leader()
        space = key_space_of(replica)
        body = encode_operations(operations)
        header = WriteHeader(
            client_id=_client_id(request.client_id),
            sequence=request.sequence,
            lowest_unfinished=request.lowest_unfinished,
            first_attempt_us=request.first_attempt_us,
            digest=writeop.digest(body),
            kind=BodyKind.KEYSPACE,
        )
        is_new = self._admit(replica, header)
        outcome = await self._propose_keys(
            replica, operations, header, body, request.deadline_ms, is_new=is_new
        )
        if (error := outcome.error()) is not None:
            raise error
        if request.op == pb.KV_LEASE_GRANT:
            self._leases.granted(replica)
        revision = space.recent.revision_at(outcome.timestamp)
        return pb.KvResponse(revision=revision, newest=outcome.timestamp)

    async def _propose_keys(
        self,
        replica: Replica,
        operations: list[KeyOperation],
        header: WriteHeader,
        body: bytes,
        deadline_ms: int,
        *,
        is_new: bool,
    ) -> Outcome:
        """Claim the keys and propose. Meanwhile another caller that changes one of them gets an error.

        A retry of an unfinished write finds its own claim. It gets CHANGE_IN_PROGRESS and tries again.
        """
        machine = key_space_of(replica)
        inserts = [o for o in operations if o.op is KeyOp.INSERT]
        try:
            token = machine.begin_pending([o for o in operations if o not in inserts])
        except Rejected as exc:
            raise Retryable(str(exc.args[0]), code=exc.code) from exc
        try:
            try:
                machine.reserve(token, operations, header)
            except Rejected:
                # An earlier attempt, or the delete that made room for this one, may be committed but not
                # applied yet.
                await replica.reads.linearizable_read(deadline_ms)
                replica.check_leader()
                machine.reserve(token, operations, header)
            future = replica.writes.submit(writeop.encode(header, body))
            self._load.add(replica, write_units(len(body)))
        except BaseException:
            machine.end_pending(token)
            raise
        future.add_done_callback(lambda _: machine.end_pending(token))
        if is_new:
            _expect(machine, header, future)
        return await replica.writes.outcome(future, deadline_ms or WRITE_DEADLINE_MS)

    def _admit(self, replica: Replica, header: WriteHeader) -> bool:
        """Refuse a write whose client id was made by a clock far ahead, or whose client has too many
        unfinished writes. Returns whether the tablet does not know its client id.

        Once such an id expired, ids made by correct clocks would be refused as too old. An id that the tablet
        knows passes, because a leader with another clock may have taken it.
        """
        machine = replica.machine
        if machine is None:
            raise Retryable("this replica holds no rows; ask another", code=Code.NOT_LEADER)
        is_new = not machine.knows_client(header.client_id)
        if is_new:
            self._check_made("the client id", header.first_attempt_us, replica)
        machine.admit(header, self._wall_clock.read(), replica.options.clock_error_max_ms * 1_000)
        return is_new

    def _check_made(self, what: str, made_us: int, replica: Replica) -> None:
        """Refuse a client id that was made by a clock far ahead."""
        wall_us, error_us = self._wall_clock.read(), replica.options.clock_error_max_ms * 1_000
        wait_us = made_us - wall_us - error_us
        if wait_us > 0:
            if fault := self._wall_clock.fault(wall_us):
                raise Retryable(fault, code=Code.NOT_READY)
            wait_ms = -(-wait_us // 1_000)
            raise Rejected(
                f"{what} was made at {utc(made_us)}, {(made_us - wall_us) / 1e6:.1f} s ahead of the "
                f"clock of node {self._node_id[:8]}, which says {utc(wall_us)}; at most {error_us / 1e6:g} s "
                "is allowed; correct the clock of the writing machine",
                code=Code.CLOCK_AHEAD,
                retry_after_ms=wait_ms if wait_ms <= RETRY_AFTER_MS_MAX else 0,
            )

    # --- unary calls

    async def OpenClientStream(self, request: common_pb2.OpenStreamRequest, context: Any) -> Any:
        """Tell a client where its requests go, and the key to begin with."""
        return self._streams.introduce(request)

    async def ListTablets(self, request: pb.ListTabletsRequest, context: Any) -> pb.ListTabletsResponse:
        """List every replica here."""
        return pb.ListTabletsResponse(replicas=all_reports(self._replicas))

    async def GetNodeStatus(self, request: pb.GetNodeStatusRequest, context: Any) -> pb.GetNodeStatusResponse:
        """Describe the node itself."""
        return self._status()

    async def Checksum(self, request: pb.ChecksumRequest, context: Any) -> pb.ChecksumResponse:
        """Compute the checksum of a tablet's rows and exactly-once state; of a dropped table, too."""
        replica = self._replicas.get(id_from_pb(request.tablet_id))
        check_incarnation(replica, request.tablet_incarnation)
        if request.snapshot:
            await replica.reads.snapshot_ready(request.snapshot, prepared=request.index)
            snapshot = int(request.snapshot)
        else:
            snapshot = int(await replica.reads.latest_snapshot())
        value, rows, applied = await checksum(replica, snapshot)
        sums = key_space_of(replica).sums if replica.superblock.kind != "table" else ()
        return pb.ChecksumResponse(
            checksum=value,
            rows=rows,
            snapshot=snapshot,
            applied=opid_to_pb(applied),
            sums=[pb.StateSumPB(index=i, rows=keys, checksum=total) for i, keys, total in sums],
        )

    async def PrepareSnapshot(
        self, request: pb.PrepareSnapshotRequest, context: Any
    ) -> pb.PrepareSnapshotResponse:
        """Make a snapshot ready in many tablets. If one tablet fails, its answer says why, and the others are
        prepared all the same.
        """
        if not request.snapshot:
            raise Rejected("prepare: the snapshot is 0; expected a hybrid time")
        wanted = dict.fromkeys(request.tablet_ids)
        if len(wanted) > PREPARED_MAX:
            raise Rejected(
                f"{len(wanted)} tablets in one request to prepare a snapshot; at most {PREPARED_MAX}; send several",
                code=Code.TOO_LARGE,
            )
        tablets = await asyncio.gather(
            *(self._prepare(each, request.snapshot, request.deadline_ms) for each in wanted)
        )
        return pb.PrepareSnapshotResponse(tablets=tablets)

    async def _prepare(self, tablet_id: bytes, snapshot: int, deadline_ms: int) -> pb.PreparedTabletPB:
        try:
            replica = self._replicas.for_client(id_from_pb(tablet_id))
            key_space_of(replica) if replica.superblock.kind != "table" else store_of(replica)
            incarnation = replica.superblock.tablet_incarnation
            index = await replica.reads.prepare(snapshot, deadline_ms)
            check_incarnation(replica, incarnation, exact=True)
        except SteleError as exc:
            let_go(exc)
            return pb.PreparedTabletPB(tablet_id=tablet_id, error=error_to_pb(exc))
        return pb.PreparedTabletPB(tablet_id=tablet_id, index=index, tablet_incarnation=incarnation)

    async def SplitKeys(self, request: pb.SplitKeysRequest, context: Any) -> pb.SplitKeysResponse:
        """Return keys that cut a tablet into parts of about the same bytes, by the files that this replica
        has.
        """
        replica = self._replicas.of_request(request.tablet_id)
        check_tablet(replica, "table", request.tablet_incarnation)
        if not request.bytes:
            raise Rejected("split keys: parts of 0 bytes; expected 1 or more")
        return pb.SplitKeysResponse(keys=store_of(replica).split_keys(request.bytes))

    async def HoldHistory(self, request: pb.HoldHistoryRequest, context: Any) -> pb.HoldHistoryResponse:
        """Change or show the holds on the history of a tablet that this node leads."""
        replica = self._replicas.of_request(request.tablet_id)
        return await hold_history(replica, request, self._cluster_version())


def _check_digest(block: bytes, digest: int) -> int:
    found = writeop.digest(block)
    if digest and digest != found:
        raise Rejected("the block does not match its digest; send it again", code=Code.DIGEST_MISMATCH)
    return found


def _early(durability: int) -> asyncio.Future[Outcome] | None:
    """The future of an early outcome, for a caller that accepts an answer before the commit; else None."""
    if durability == pb.SYNCED:
        return None
    if durability != pb.MEMORY:
        raise Rejected(
            f"durability {durability}: this program knows 0 (synced) and 1 (memory); upgrade it, or ask for one of them"
        )
    return asyncio.get_running_loop().create_future()


def attempt_of(request: pb.WriteRequest) -> Attempt | None:
    """The attempt that a write names; None if it names none."""
    if not request.HasField("attempt"):
        return None
    told = request.attempt
    if len(told.job) != 16:
        raise Rejected(f"the id of the job has {len(told.job)} bytes; expected 16")
    return Attempt(told.job, told.made_us, told.part, told.number)


def _expect(machine: StateMachine, header: WriteHeader, write: asyncio.Future[Outcome]) -> None:
    """Count a new client id or job as soon as it is proposed."""
    machine.expect(header)
    write.add_done_callback(lambda _: machine.stop_expecting(header))


def operations_of(request: pb.KvRequest) -> list[KeyOperation]:
    """The operations on a key space that a request asks for."""
    if request.op == pb.KV_WRITE:
        return decode_write(request.operations)
    if request.op in (pb.KV_LEASE_GRANT, pb.KV_LEASE_REVOKE):
        if not 0 < request.lease <= LEASE_MAX:
            raise Rejected(f"lease {request.lease}: expected 1 to {LEASE_MAX}")
        granted = request.op == pb.KV_LEASE_GRANT
        return [grant(request.lease, check_ttl(request.ttl_ms)) if granted else revoke(request.lease)]
    op = _KV_OPS.get(request.op)
    if op is None:
        raise Rejected(
            f"key space operation {request.op}; expected replace, insert, read, delete, list, write or a lease operation"
        )
    lease = 0 if op is KeyOp.DELETE else request.lease
    return [KeyOperation(op, request.key, request.value, lease=lease)]


def _client_id(raw: bytes) -> bytes:
    if len(raw) not in (0, 16):
        raise Rejected(
            f"client id of {len(raw)} bytes; expected 16, or none for a write that may be applied twice"
        )
    return raw or writeop.NO_CLIENT

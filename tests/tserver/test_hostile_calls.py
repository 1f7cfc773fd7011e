"""Every unary call and client request, every field, every kind of hostile value: refused or done, never INTERNAL; and all
else goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from stele.client import AsyncClient
from stele.client.streams import Streams
from stele.consensus.replica import ReplicaState
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, SteleError
from stele.model.ids import NodeId, TabletId, new_id
from stele.model.kvop import encode_write
from stele.model.partition import PartitionSchema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb
from stele.rpc.convert_schema import schema_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import (
    common_pb2,
    consensus_pb2,
    consensus_pb2_grpc,
    master_pb2,
    master_pb2_grpc,
    tserver_pb2,
    tserver_pb2_grpc,
)
from tests.tserver.local import SCHEMA, LocalCluster, count

NODES = 1
AT_ONCE = 16
CALL_S = 5.0
STREAM = "client stream"
"""Not a service: what is sent there, by the field of ClientRequest that holds it."""

_F = FieldDescriptor
_INTEGERS = {
    _F.TYPE_UINT32: (0, (1 << 32) - 1, 1 << 31),
    _F.TYPE_UINT64: (0, 1, 1 << 63, (1 << 64) - 1),
    _F.TYPE_FIXED64: (0, 1 << 63, (1 << 64) - 1),
    _F.TYPE_INT64: (-(1 << 63), -2, (1 << 63) - 1),
    _F.TYPE_SINT32: (0, -1, -(2**31), 2**31 - 1),
    _F.TYPE_SINT64: (-(1 << 63), 0, (1 << 63) - 1),
    _F.TYPE_ENUM: (0, 9, -1, (1 << 31) - 1),
    _F.TYPE_BOOL: (True, False),
}
_TEXTS = (
    *("", "x", "x" * 1_000_000, "\x1b[2J\u202e\x00", "../../etc/passwd", "NaN", "1e999", "9" * 5_000),
    *("[" * 100_000, '{"a":' * 50_000),
)
_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 16,
    b"x" * 15,
    b"x" * 1_000_000,
    b"[" * 100_000,
    b"1e999",
    b"NaN",
    b"9" * 5_000,
)


def hostile(request: Message) -> Iterator[tuple[str, Message]]:
    """(what was changed, the request with it): one field at a time, at any depth of what the request holds."""
    for field in request.DESCRIPTOR.fields:
        for number, value in enumerate(_values(request, field)):
            changed = type(request)()
            changed.CopyFrom(request)
            if field.is_repeated:
                changed.ClearField(field.name)
                getattr(changed, field.name).extend(value)
            elif field.message_type is not None:
                getattr(changed, field.name).CopyFrom(value)
            else:
                setattr(changed, field.name, value)
            yield f"{request.DESCRIPTOR.name}.{field.name} #{number} {str(value)[:30]!r}", changed


def _values(request: Message, field: FieldDescriptor) -> Iterator[Any]:
    present = getattr(request, field.name)
    if field.message_type is not None:
        one = present[0] if field.is_repeated and len(present) else None
        if field.is_repeated:
            one = one if one is not None else _empty(present)
            yield []
            yield [one] * 2_000
        for _, changed in hostile(one if field.is_repeated else present):
            yield [changed] if field.is_repeated else changed
        return
    if field.type == _F.TYPE_STRING:
        values: tuple[Any, ...] = _TEXTS
    elif field.type == _F.TYPE_BYTES:
        values = _BYTES
    else:
        values = _INTEGERS[field.type]
    if not field.is_repeated:
        yield from values
        return
    yield []
    for value in values:
        yield [value]
        yield [value] * 300 if not isinstance(value, str | bytes) or len(value) < 100 else [value] * 3


def _empty(present: Any) -> Message:
    made: Message = present.add()
    del present[:]
    return made


def templates(
    cluster: LocalCluster, prey: TabletId, space: TabletId, caller: Identity, epoch: int
) -> dict[str, dict[str, Message]]:
    """A sound request of each method, as far as one can be made without harm, by service."""
    node = cluster.running["node-0"]
    tablet, nobody, mine = id_to_pb(prey), id_to_pb(new_id()), id_to_pb(caller.node_id)
    config = config_to_pb(node.replicas.get(prey).config)
    opid = opid_to_pb(node.replicas.get(prey).committed_opid)
    hello = caller.hello(channel="control")
    intent = master_pb2.IntentPB(tablet_id=tablet, target_node=mine, source_node=nobody, witness_start=opid)
    heartbeat = master_pb2.TSHeartbeatRequest(
        node_id=mine,
        incarnation=caller.incarnation,
        sequence=1,
        registration=master_pb2.NodeRegistrationPB(
            address="127.0.0.1:1", role="node", cluster_version=CLUSTER_VERSION
        ),
        has_report=True,
        tablets=[node.replicas.get(prey).status()],
    )
    schema = schema_to_pb(SCHEMA)
    hashed = {"hash": [{"column_ids": [0], "buckets": 2}], "range": {"column_ids": [0], "split_keys": [b"x"]}}
    of_master = {
        "TSHeartbeat": heartbeat,
        "CreateTable": master_pb2.CreateTableRequest(
            name="hostile", schema=schema, partitioning=hashed, replication_factor=3
        ),
        "AlterTable": master_pb2.AlterTableRequest(
            name="nothing",
            alter_id=nobody,
            new_name="x",
            steps=[
                {"add_column": {"name": "c", "type": "int8", "nullable": True}},
                {"drop_column": "c"},
                {"rename_column": {"name": "c", "new_name": "d"}},
                {"change_default": {"name": "c", "default_value": b"1"}},
            ],
        ),
        "DeleteTable": master_pb2.DeleteTableRequest(name="nothing"),
        "DropTable": master_pb2.DropTableRequest(name="nothing", keep_ms=60_000, drop_id=nobody),
        "RecallTable": master_pb2.RecallTableRequest(table_id=nobody, new_name="again", recall_id=nobody),
        "SetKeepDropped": master_pb2.SetKeepDroppedRequest(keep_ms=60_000),
        "GetTable": master_pb2.GetTableRequest(name="prey"),
        "GetTableLocations": master_pb2.GetTableLocationsRequest(name="prey"),
        "GetTabletLocations": master_pb2.GetTabletLocationsRequest(tablet_ids=[tablet]),
        "SetReplicationFactor": master_pb2.SetReplicationFactorRequest(name="nothing", replication_factor=3),
        "PlaceTablet": master_pb2.PlaceTabletRequest(
            tablet_id=nobody, what=master_pb2.ADD_REPLICA, to_node=nobody, replicas=2
        ),
        "RecoverTablet": master_pb2.RecoverTabletRequest(
            tablet_id=nobody,
            survivor_node=nobody,
            survivor_replica=1,
            last_logged=opid,
            owner="me",
            told="x",
        ),
        "FinalizeClusterVersion": master_pb2.FinalizeClusterVersionRequest(cluster_version=CLUSTER_VERSION),
        "SetMasterCount": master_pb2.SetMasterCountRequest(masters=1),
        "WantNode": master_pb2.WantNodeRequest(
            node_id=nobody, wanted=master_pb2.WANTED_PARKED, for_ms=60_000
        ),
        "KeepLeader": master_pb2.KeepLeaderRequest(tablet_id=tablet, for_ms=1),
        "SetDriverPolicy": master_pb2.SetDriverPolicyRequest(
            policy={"dead_after_ms": 30_000, "max_lost_nodes": 1, "max_copies": 1, "owner": "me"}
        ),
        "ClaimDriver": master_pb2.ClaimDriverRequest(holder="me", ttl_ms=1),
        "BeginIntent": master_pb2.BeginIntentRequest(epoch=epoch, intent=intent),
        "EndIntent": master_pb2.EndIntentRequest(
            epoch=epoch, tablet_id=tablet, replica_id=9, committed_config=config
        ),
        "RecordCheck": master_pb2.RecordCheckRequest(
            epoch=epoch,
            tablet_id=tablet,
            copy=master_pb2.CopyRecordPB(replica_id=1, other_replica=2, rows=1, checksum=1, other_rows=2),
        ),
        "RegisterNode": master_pb2.RegisterNodeRequest(node_id=mine, role="node", name="x"),
        "SetNodeState": master_pb2.SetNodeStateRequest(node_id=nobody, state=master_pb2.ACTIVE),
        "ConfirmFormation": master_pb2.ConfirmFormationRequest(
            cluster_id=nobody, masters=[{"node_id": nobody}]
        ),
    }
    of_consensus = {
        "OpenPeerStream": common_pb2.OpenStreamRequest(hello=hello),
        "BulkChangeConfig": consensus_pb2.BulkChangeConfigRequest(
            tablet_id=tablet, type=consensus_pb2.MODIFY_PEER, peer=config.peers[0], cas_config_opid_index=-1
        ),
        "LeaderStepDown": consensus_pb2.LeaderStepDownRequest(tablet_id=tablet, target_node=nobody),
        "RunLeaderElection": consensus_pb2.RunLeaderElectionRequest(tablet_id=nobody),
        "UnsafeChangeConfig": consensus_pb2.UnsafeChangeConfigRequest(
            tablet_id=nobody, replica_id=1, tablet_incarnation=1, at_least=opid
        ),
        "GetConsensusState": consensus_pb2.GetConsensusStateRequest(tablet_ids=[tablet]),
        "StartTabletCopy": consensus_pb2.StartTabletCopyRequest(
            tablet_id=tablet,
            replica_id=1,
            source_node=nobody,
            source_address="127.0.0.1:1",
            witness_start=opid,
        ),
    }
    of_copies = {
        "BeginTabletCopySession": consensus_pb2.BeginTabletCopySessionRequest(
            tablet_id=nobody, at_least=opid
        ),
        "KeepAliveTabletCopySession": consensus_pb2.KeepAliveTabletCopySessionRequest(session_id="x"),
        "EndTabletCopySession": consensus_pb2.EndTabletCopySessionRequest(session_id="x"),
    }
    of_tablets = {
        "OpenClientStream": common_pb2.OpenStreamRequest(hello=hello),
        "Checksum": tserver_pb2.ChecksumRequest(tablet_id=tablet),
        "PrepareSnapshot": tserver_pb2.PrepareSnapshotRequest(snapshot=1, tablet_ids=[tablet, nobody]),
        "SplitKeys": tserver_pb2.SplitKeysRequest(tablet_id=tablet, bytes=1),
        "HoldHistory": tserver_pb2.HoldHistoryRequest(
            tablet_id=tablet,
            action=tserver_pb2.HOLD_TAKE,
            hold="h",
            expires_in_ms=60_000,
            bytes_max=1 << 20,
            deadline_ms=1_000,
        ),
    }
    of_admins = {
        "CreateTablet": tserver_pb2.CreateTabletRequest(
            tablet_id=tablet,
            table_id=nobody,
            schema=schema,
            partitioning=hashed,
            partition={"hash_buckets": [0]},
            config=config,
        ),
        "AlterTablet": tserver_pb2.AlterTabletRequest(tablet_id=nobody, schema=schema, catalog_opid=opid),
        "DeleteTablet": tserver_pb2.DeleteTabletRequest(
            tablet_id=nobody, replica_id=9, target=3, catalog_opid=opid
        ),
        "FlushTablet": tserver_pb2.FlushTabletRequest(tablet_id=tablet),
    }
    of_streams = {
        "write": tserver_pb2.WriteRequest(
            tablet_id=tablet, client_id=nobody, sequence=1, block=b"x", durability=tserver_pb2.MEMORY
        ),
        "read": tserver_pb2.ReadRequest(tablet_id=tablet, keys=b"x", column_ids=[0], schema_version=1),
        "kv": tserver_pb2.KvRequest(
            tablet_id=id_to_pb(space),
            op=tserver_pb2.KV_WRITE,
            key=b"k",
            client_id=nobody,
            operations=encode_write({b"k": b"v"}, {b"other": None}),
            lease=1,
            ttl_ms=1_000,
        ),
        "watch": tserver_pb2.KvWatchRequest(tablet_id=id_to_pb(space), number=1, key=b"k", after=1),
    }
    return {
        STREAM: of_streams,
        "MasterService": of_master,
        "ConsensusService": of_consensus,
        "TabletCopyService": of_copies,
        "TabletServerService": of_tablets,
        "TabletServerAdminService": of_admins,
    }


_WITHOUT_FIELDS = {"ListTables", "ListMasters", "GetClusterView", "ListTablets", "GetNodeStatus"}
"""Methods whose requests have no field, or a flag alone; called as they are."""


@pytest.fixture
def cluster_services() -> dict[str, set[str]]:
    return {
        service.name: {method.name for method in service.methods}
        for module in (master_pb2, consensus_pb2, tserver_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }


STUBS: dict[str, type] = {
    "MasterService": master_pb2_grpc.MasterServiceStub,
    "ConsensusService": consensus_pb2_grpc.ConsensusServiceStub,
    "TabletCopyService": consensus_pb2_grpc.TabletCopyServiceStub,
    "TabletServerService": tserver_pb2_grpc.TabletServerServiceStub,
    "TabletServerAdminService": tserver_pb2_grpc.TabletServerAdminServiceStub,
}


async def attack(
    cluster: LocalCluster, pool: ChannelPool, requests: dict[str, dict[str, Message]]
) -> tuple[Counter[str], list[str]]:
    """What was answered, and what never may be."""
    gate, answers, wrong = asyncio.Semaphore(AT_ONCE), Counter[str](), list[str]()
    node, streams = cluster.running["node-0"], Streams(pool)

    async def send(service: str, method: str, request: Message) -> None:
        if service == STREAM:
            asked = tserver_pb2.ClientRequest()
            getattr(asked, method).CopyFrom(request)
            await streams.to(node.node_id, node.address).ask(asked, timeout_s=CALL_S)
            return
        address = cluster.master_address if service == "MasterService" else node.address
        await pool.unary(address, STUBS[service], method, request, timeout_s=CALL_S)

    async def call(service: str, method: str, what: str, request: Message) -> None:
        async with gate:
            try:
                await send(service, method, request)
                code = Code.OK
            except SteleError as exc:
                code = exc.code
                if code in (Code.INTERNAL, Code.IO_ERROR, Code.CORRUPT):
                    wrong.append(f"{method}: {what}: {exc}")
        answers[code.name] += 1

    await asyncio.gather(
        *(
            call(service, method, what, changed)
            for service, of_service in requests.items()
            for method, request in of_service.items()
            for what, changed in hostile(request)
        )
    )
    await streams.close()
    return answers, wrong


async def goes_on(client: AsyncClient, rows: int) -> None:
    table = await client.open_table("good")
    await table.put({"id": rows, "name": "after"})
    assert await count(client, "good") == rows + 1


async def test_no_call_with_a_hostile_field_is_internal_and_all_else_goes_on(
    cluster: LocalCluster, cluster_services: dict[str, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    node, master = cluster.running["node-0"], cluster.running["master"]
    async with cluster.client() as client:
        prey = await client.create_table("prey", SCHEMA, PartitionSchema(), replication_factor=1)
        await client.create_table("good", SCHEMA, PartitionSchema(), replication_factor=1)
        space = await client.create_keyspace("space", replication_factor=1)
        await space.replace("k", "v")
        await prey.put({"id": 1, "name": "x"})
        await goes_on(client, 0)
        caller = replace(node.description.identity, node_id=NodeId(new_id()))
        pool = ChannelPool(caller)
        try:
            held = prey.tablet(0).place.tablet_id
            mine = id_to_pb(caller.node_id)
            stub, address = STUBS["MasterService"], cluster.master_address
            await pool.unary(address, stub, "RegisterNode", master_pb2.RegisterNodeRequest(node_id=mine))
            driver = master_pb2.ClaimDriverRequest(holder="me", ttl_ms=1)
            claimed = await pool.unary(address, stub, "ClaimDriver", driver)
            keys = space._tablet.place.tablet_id
            requests = templates(cluster, TabletId(held), TabletId(keys), caller, claimed.claim.epoch)
            missing = {s: m - requests[s].keys() - _WITHOUT_FIELDS for s, m in cluster_services.items()}
            assert not any(missing.values()), missing
            claims = {"MasterService": {"ClaimDriver": requests["MasterService"].pop("ClaimDriver")}}
            answers, wrong = await attack(cluster, pool, requests)
            more, also = await attack(cluster, pool, claims)  # each takes the epoch of the one before
            answers, wrong = answers + more, wrong + also
        finally:
            await pool.close()
        assert wrong == [], "\n".join(wrong[:20])
        assert answers[Code.INVALID_ARGUMENT.name] > 100, answers
        await goes_on(client, 1)
        for one in (node, master):
            assert not one.failed.done()
            assert [
                (str(r.superblock.key), r.error) for r in one.replicas if r.state is ReplicaState.FAILED
            ] == []
    assert "failed because of a bug" not in capsys.readouterr().out

"""The contract of the catalog port, on the in-memory one and on a raft replica in a real master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.port import CatalogLog, drop, insert, put, swap, unchanged
from stele.master.records import ClaimRecord, NodeRecord, key_of
from stele.master.replica_log import ReplicaCatalogLog
from stele.master.row_encoding import decode, encode
from stele.model.errors import Code, NotLeader, SteleError
from stele.model.ids import CATALOG_TABLET_ID, ClusterId, NodeId, OpId
from stele.model.kvop import KeyOp, KeyOperation
from stele.raft.events import Persisted
from stele.tserver.node import Node, start_node
from stele.tserver.options import FirstMaster, NodeOptions
from tests.master.harness import until
from tests.master.memory_log import MemoryGroup

ID = NodeId("a" * 32)
FIRST = NodeRecord(NodeId("1" * 32), "node", "ACTIVE")
LATER = NodeRecord(NodeId("1" * 32), "node", "DRAINING")


async def memory(directory: Path) -> AsyncIterator[CatalogLog]:
    group = MemoryGroup(directory, [ID])
    group.elect(ID)
    yield group.members[ID]


def lone_master(directory: Path) -> NodeOptions:
    """Of a master that is all there is."""
    return NodeOptions(
        data_dir=directory / "volume",
        node_id=ID,
        cluster_id=ClusterId("c" * 32),
        listen="127.0.0.1:0",
        advertise="127.0.0.1:1",
        role="master",
        http_port=0,
        flight_port=0,
        stream_port=0,
        first_masters=(FirstMaster(ID, "127.0.0.1:1"),),
    )


async def lone_replica(directory: Path) -> AsyncIterator[tuple[Node, CatalogLog]]:
    """Of the catalog, on a node without a master in it."""
    node = await start_node(lone_master(directory))
    try:
        await until(lambda: node.replicas.holds(CATALOG_TABLET_ID))
        await node.formation.confirm([(ID, node.volume.record.format_id)])
        log = ReplicaCatalogLog(lambda: node.replicas.current(CATALOG_TABLET_ID))
        log.watch()
        await until(lambda: log.is_leader)
        yield node, log
    finally:
        await node.stop(hand_over=False)


async def replica(directory: Path) -> AsyncIterator[CatalogLog]:
    async for _, log in lone_replica(directory):
        yield log


@pytest.fixture(params=[memory, replica], ids=["memory", "replica"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CatalogLog]:
    """The port on a lone master that leads."""
    async for made in request.param(tmp_path):
        yield made


def row(log: CatalogLog, record: object) -> bytes | None:
    assert log.key_space is not None
    return log.key_space.read(key_of(record))


async def code_of(call: object) -> Code:
    try:
        await call  # type: ignore[misc]
    except SteleError as exc:
        return exc.code
    return Code.OK


async def test_on_return_a_batch_is_applied_whole(log: CatalogLog) -> None:
    await log.read_barrier()
    await log.propose([insert(FIRST), put(ClaimRecord("d", 1, 5))])
    assert row(log, FIRST) == encode(FIRST) and row(log, ClaimRecord()) == encode(ClaimRecord("d", 1, 5))
    await log.propose([drop(FIRST)])
    assert row(log, FIRST) is None


async def test_a_refused_batch_changes_nothing(log: CatalogLog) -> None:
    await log.propose([insert(FIRST)])
    claim = ClaimRecord("d", 1, 5)
    assert await code_of(log.propose([put(claim), insert(LATER)])) is Code.ALREADY_PRESENT
    assert await code_of(log.propose([put(claim), swap(LATER, FIRST)])) is Code.CAS_FAILED
    assert await code_of(log.propose([put(claim), unchanged(LATER)])) is Code.CAS_FAILED
    assert await code_of(log.propose([put(claim), drop(LATER)])) is Code.CAS_FAILED
    assert row(log, claim) is None and row(log, FIRST) == encode(FIRST)
    await log.propose([swap(FIRST, LATER)])
    assert row(log, FIRST) == encode(LATER)


async def test_a_batch_that_there_is_no_room_for_is_not_proposed(log: CatalogLog) -> None:
    await log.propose([insert(FIRST)])
    assert log.key_space is not None
    log.key_space.bytes_max = log.key_space.held_bytes
    applied = log.key_space.applied
    assert await code_of(log.propose([insert(LATER), put(ClaimRecord("d", 1, 5))])) is Code.TOO_LARGE
    assert log.key_space.applied == applied
    await log.propose([put(FIRST)])
    await log.propose([drop(FIRST)])
    await log.propose([insert(FIRST)])
    assert row(log, FIRST) == encode(FIRST) and row(log, ClaimRecord()) is None


@pytest.mark.parametrize(
    ("ends", "changed_ends"),
    [
        (b'"m1"]', b'"m1","","","",0,0,0,false,"","",0,0]'),
        (b'"m1","","","",0,0,0,false,"","",0,0,"rack 7",[1.5]]',) * 2,
    ],
    ids=["earlier", "later"],
)
async def test_rows_of_another_program_are_compared_as_they_stand(
    log: CatalogLog, ends: bytes, changed_ends: bytes
) -> None:
    begins = b'\x01["%s","node","ACTIVE",true,"","10.0.0.1:7050","",0,' % FIRST.node_id.encode()
    await log.propose([KeyOperation(KeyOp.INSERT, key_of(FIRST), begins + ends)])
    found = decode(NodeRecord, row(log, FIRST) or b"")
    assert found == replace(FIRST, formed=True, address="10.0.0.1:7050", machine="m1")
    moved = replace(found, state="DRAINING")
    for wrong in (unchanged(moved), drop(moved), swap(moved, found)):
        assert await code_of(log.propose([wrong])) is Code.CAS_FAILED
    await log.propose([unchanged(found), put(ClaimRecord("d", 1, 5))])
    await log.propose([swap(found, moved)])
    assert row(log, FIRST) == begins.replace(b"ACTIVE", b"DRAINING") + changed_ends
    await log.propose([drop(moved)])
    assert row(log, FIRST) is None


async def test_batches_are_applied_in_the_order_they_were_proposed_in(log: CatalogLog) -> None:
    seen: list[tuple[bytes | None, bytes | None]] = []
    opids: list[OpId] = []
    assert log.key_space is not None

    def note(key: bytes, old: bytes | None, new: bytes | None, opid: OpId) -> None:
        seen.append((old, new))
        opids.append(opid)

    log.key_space.add_commit_listener(note)
    claims = [ClaimRecord("d", epoch, 0) for epoch in range(1, 30)]
    await asyncio.gather(*(log.propose([put(c)]) for c in claims))
    rows = [encode(c) for c in claims]
    assert seen == list(zip([None, *rows], rows))
    assert opids == sorted(set(opids)) and all(o.term == log.term for o in opids)


async def test_facts(log: CatalogLog) -> None:
    heard: list[bool] = []
    log.on_role_change(lambda: heard.append(log.is_leader))
    assert heard == [True]
    assert log.leader_node == ID and log.term >= 1
    assert [p.node_id for p in log.committed_config.peers] == [ID]


@pytest.fixture
async def lone(tmp_path: Path) -> AsyncIterator[tuple[Node, CatalogLog]]:
    """The only replica, on its node."""
    async for made in lone_replica(tmp_path):
        yield made


async def test_who_listens_hears_that_the_replica_has_ended(lone: tuple[Node, CatalogLog]) -> None:
    """A master led on in its own word, and nothing woke it."""
    node, log = lone
    heard: list[bool] = []
    log.on_role_change(lambda: heard.append(log.is_leader))
    runtime = node.replicas.get(CATALOG_TABLET_ID).runtime
    assert runtime is not None
    runtime.post(Persisted(1 << 40))  # its core refuses to go on
    await until(lambda: not log.is_leader)
    assert heard[0] and not heard[-1] and log.leader_node == ""


async def test_a_log_without_a_replica_is_not_ready() -> None:
    log = ReplicaCatalogLog(lambda: None)
    assert not log.is_leader and log.key_space is None and log.leader_node == ""
    assert not await log.fresh(60_000)
    assert await code_of(log.propose([put(FIRST)])) is Code.NOT_READY


async def test_a_follower_refuses_with_a_hint(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path, [ID, "b" * 32])
    group.elect("b" * 32)
    with pytest.raises(NotLeader) as refused:
        await group.members[ID].propose([put(FIRST)])
    assert refused.value.leader_hint == "b" * 32

"""Rows of earlier and of later programs: they are read, changed and dropped as they stand, and what is not known of them stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.catalog import Catalog
from stele.master.master import Master
from stele.master.port import swap
from stele.master.records import (
    CLAIM_KEY,
    CLUSTER_KEY,
    INTENT_PREFIX,
    NODE_PREFIX,
    TABLE_PREFIX,
    TABLET_PREFIX,
    ClaimRecord,
    ClusterRecord,
    IntentRecord,
    NodeRecord,
    TableRecord,
    TabletRecord,
    key_of,
)
from stele.master.row_encoding import VERSION, encode
from stele.master.server import start_master
from stele.model.by_hand import NOT_BY_HAND
from stele.model.config import Configuration
from stele.model.errors import SteleError, of_later_program
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.kvop import KeyOp, KeyOperation
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from stele.tablet.keyspace import KeySpace
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    Call,
    World,
    claimed,
    made,
    ready,
    ready_again,
    until,
    world,
)
from tests.master.test_catalog_log import lone_master, lone_replica
from tests.master.test_following import commit, same

KINDS = {
    TABLE_PREFIX: TableRecord,
    TABLET_PREFIX: TabletRecord,
    NODE_PREFIX: NodeRecord,
    INTENT_PREFIX: IntentRecord,
    CLAIM_KEY: ClaimRecord,
    CLUSTER_KEY: ClusterRecord,
}
SURPLUS = ["rack 7", [1.5, None], {"b": 1, "a": "ü"}]


def longer(key: bytes, row: bytes) -> bytes:
    """As a later program writes it, with three fields more."""
    values = json.loads(row[1:])
    return row if values[-3:] == SURPLUS else row[:1] + _compact(values + SURPLUS)


def shorter(key: bytes, row: bytes) -> bytes:
    """As an earlier program wrote it that did not have the last fields, where they say what rows without them mean."""
    (kind,) = (kind for prefix, kind in KINDS.items() if key.startswith(prefix))
    defaults = [json.loads(_compact(_plain(f.default))) for f in dataclasses.fields(kind) if f.compare]
    values = json.loads(row[1:])
    if kind is NodeRecord and len(values) == len(defaults):
        values[-1] = defaults[-1]  # its program did not tell a cluster version
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return row[:1] + _compact(values)


def spaced(key: bytes, row: bytes) -> bytes:
    """The same values, spelt otherwise."""
    return row[:1] + json.dumps(json.loads(row[1:]), indent=1).encode()


def _compact(values: object) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _plain(default: object) -> object:
    if default == NOT_BY_HAND:
        return []
    return default if isinstance(default, str | int | bool | tuple) else "no default"


def rewrite(w: World, how: Callable[[bytes, bytes], bytes]) -> int:
    """Every row as another program would have written it; how many differ."""
    rows = [(key, row, how(key, row)) for key, row in content(w).items()]
    changed = [KeyOperation(KeyOp.REPLACE, key, new) for key, row, new in rows if new != row]
    if changed:
        commit(w, changed)
    return len(changed)


def key_space(w: World, node_id: str = MASTERS[0]) -> KeySpace:
    """A master's."""
    found = w.group.members[node_id].key_space
    assert found is not None
    return found


def content(w: World) -> dict[bytes, bytes]:
    """All rows."""
    return dict(key_space(w).list())


HOWS = pytest.mark.parametrize("how", [shorter, longer, spaced], ids=lambda how: how.__name__)


@HOWS
async def test_rows_of_other_programs_are_changed_and_dropped(
    tmp_path: Path, how: Callable[[bytes, bytes], bytes]
) -> None:
    """What a row was expected to hold was made anew from its record: no batch with such a row was ever taken."""
    async with world(tmp_path) as w:
        await ready(w)
        assert rewrite(w, how) >= 5  # one for each node at the least
        for node in w.nodes.values():
            node.machine += "x"
        await w.beat_until(lambda: all(n.machine.endswith("x") for n in nodes_of(w)))

        rewrite(w, how)
        table_id = await made(w, "t", buckets=2)
        rewrite(w, how)
        epoch = await claimed(w)
        rewrite(w, how)
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert await claimed(w) == epoch + 1
        await an_intent_begun_taken_over_and_ended(w, table_id, epoch + 1, how)
        node_id = await a_node_registered_named_and_retired(w, epoch + 1, how)

        rewrite(w, how)
        await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)
        rewrite(w, how)
        for node in w.nodes.values():
            node.replicas.clear()
        w.shift_ms += OPTIONS.forget_after_ms
        await w.beat_until(lambda: not w.catalog.gone and not w.catalog.tables)

        rows = content(w)
        assert NODE_PREFIX + node_id.encode() in rows and w.catalog.nodes[node_id].state == "RETIRED"
        if how is longer:
            assert all(json.loads(row[1:])[-3:] == SURPLUS for row in rows.values())
        for master in w.masters.values():
            assert same(master.catalog, Catalog(rows.items(), master.catalog.opid))
            assert dict(key_space(w, master.node_id).list()) == rows


def nodes_of(w: World) -> list[NodeRecord]:
    """The rows of nodes that are no masters."""
    return [n for n in w.catalog.nodes.values() if n.role == "node"]


async def an_intent_begun_taken_over_and_ended(
    w: World, table_id: str, epoch: int, how: Callable[[bytes, bytes], bytes]
) -> None:
    """Each on rows that another program has written meanwhile."""
    tablet = w.catalog.current_tablets(table_id)[0]
    held = {p.node_id for p in tablet.config.peers}
    asked = pb.IntentPB(
        tablet_id=id_to_pb(tablet.tablet_id), target_node=id_to_pb(min(n for n in w.nodes if n not in held))
    )
    rewrite(w, how)
    intent = (await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)).intent
    asked.replica_id = intent.replica_id
    rewrite(w, how)
    await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
    rewrite(w, how)
    ended = pb.EndIntentRequest(
        epoch=epoch,
        tablet_id=asked.tablet_id,
        replica_id=intent.replica_id,
        committed_config=config_to_pb(Configuration(9, tablet.config.peers)),
        term=1,
    )
    await w.leader.EndIntent(ended, None)
    assert not w.catalog.intents and w.catalog.tablets[tablet.tablet_id].config.opid_index == 9


async def a_node_registered_named_and_retired(
    w: World, epoch: int, how: Callable[[bytes, bytes], bytes]
) -> str:
    """Its id. It is known by its row alone."""
    node_id = "e" * 32
    await w.leader.RegisterNode(pb.RegisterNodeRequest(node_id=id_to_pb(node_id)), Call())
    rewrite(w, how)
    await w.leader.RegisterNode(pb.RegisterNodeRequest(node_id=id_to_pb(node_id), name="n-9"), Call())
    assert w.catalog.nodes[node_id].name == "n-9"
    for state in (pb.DRAINING, pb.RETIRED):
        rewrite(w, how)
        move = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(node_id), state=state)
        await w.leader.SetNodeState(move, None)
    return node_id


async def test_a_table_asked_for_again_is_the_same_whatever_a_later_program_added(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = pb.CreateTableRequest(
            name="k", kind="keyspace", replication_factor=3, table_id=id_to_pb("7" * 32)
        )
        first = await w.leader.CreateTable(request, None)
        rewrite(w, longer)
        assert (await w.leader.CreateTable(request, None)).table_id == first.table_id


async def test_a_record_that_was_changed_does_not_pass_for_what_is_stored(tmp_path: Path) -> None:
    """Bytes that were read belong to the record that was read, and to none that is made of it."""
    async with world(tmp_path) as w:
        await ready(w)
        rewrite(w, longer)
        node = nodes_of(w)[0]
        drained = replace(node, state="DRAINING")
        assert swap(node, drained).expected == content(w)[key_of(node)]
        assert swap(drained, node).expected == encode(drained) != encode(node)


async def test_rows_are_not_held_twice(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w, buckets=2)
        for master in w.masters.values():
            catalog, rows = master.catalog, key_space(w, master.node_id)
            for record in (*catalog.tablets.values(), *catalog.tables.values(), *catalog.nodes.values()):
                assert record.stored is rows.read(key_of(record))


LATER_ROW = KeyOperation(KeyOp.INSERT, NODE_PREFIX + b"f" * 32, bytes([VERSION + 1]) + b"whatever it is")


async def test_a_row_of_a_later_version_is_told_as_such_where_it_is_applied(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        with pytest.raises(SteleError, match=r"upgrade this program") as refused:
            commit(w, [LATER_ROW])
        assert of_later_program(refused.value)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
async def test_a_master_that_finds_a_row_of_a_later_version_ends(tmp_path: Path, leads: bool) -> None:
    """It tried again for ever and answered its probes all the while, or said nothing."""
    w = World(tmp_path, OPTIONS)
    commit(w, [LATER_ROW])
    failed: list[Exception] = []
    member = w.group.members[MASTERS[0]]
    if leads:
        w.group.elect(MASTERS[0])
    master = Master(MASTERS[0], "c" * 32, member, w.pool, OPTIONS, on_failure=failed.append)
    master.start()
    try:
        await until(lambda: bool(failed))
        assert of_later_program(failed[0])
        assert dict(key_space(w).list()) == {LATER_ROW.key: LATER_ROW.value}
    finally:
        await master.stop()
        await w.pool.close()


async def test_a_master_on_a_volume_with_a_row_of_a_later_version_ends_at_each_start(tmp_path: Path) -> None:
    """It has leave to end only: its files are as the later program left them."""
    async for node, log in lone_replica(tmp_path):
        await log.propose([LATER_ROW])
        found = node.replicas.current(CATALOG_TABLET_ID)
        assert found is not None
        await found.storage.flush()
    for _ in range(2):
        node = await start_master(lone_master(tmp_path))
        try:
            await until(node.failed.done)
            assert of_later_program(node.failed.result())
            assert node.replicas.holds(CATALOG_TABLET_ID)
        finally:
            await node.stop(hand_over=False)
    async for _, log in lone_replica(tmp_path):  # whoever does not read the row finds the replica well
        assert log.key_space is not None and log.key_space.read(LATER_ROW.key) == LATER_ROW.value

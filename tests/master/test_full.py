"""A catalog without room: what makes it no larger goes on, all else waits, and what heals tablets has a part of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog.testing

from stele.master.background import REPLACED_QUARTERS
from stele.master.port import insert
from stele.model.bounds import PLACE_CHARS_MAX
from stele.model.config import Configuration
from stele.model.errors import Code
from stele.model.ids import TabletId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, World, claimed, create_request, made, ready, refused, until, world
from tests.master.test_following import commit, gone_table

BYTES_MAX = 64_000
FULL = "the catalog is full"


def fill(w: World, bytes_held: int) -> list[TabletId]:
    """Rows of tablets that were deleted now, until the catalog holds so much."""
    space = w.group.members[w.group.leader].key_space
    assert space is not None
    table, tablets = gone_table(1)
    commit(w, [insert(table)])
    made: list[TabletId] = []
    while space.held_bytes < bytes_held:
        row = replace(tablets[0], tablet_id=TabletId(f"{len(made) + 1:032x}"), since_us=w.lead.wall_us())
        left = bytes_held - space.held_bytes - space.check_operations([insert(row)])
        if left < 1_000:
            row = replace(row, leader="x" * left)
        commit(w, [insert(row)])
        made.append(row.tablet_id)
    assert space.held_bytes == bytes_held
    return made


async def test_a_pass_goes_on_where_the_catalog_has_no_room(tmp_path: Path) -> None:
    """It ended at the first row that was to grow, each time: reports were not followed, and nothing made room again."""
    async with world(tmp_path, bytes_max=BYTES_MAX) as w:
        await ready(w, 3)
        table_id = await made(w, buckets=0)
        (row,) = w.catalog.current_tablets(table_id)
        gone = fill(w, BYTES_MAX)
        with structlog.testing.capture_logs() as told:
            moved, said = w.nodes[row.config.peers[2].node_id], w.nodes[row.leader]
            moved.machine = "m" * PLACE_CHARS_MAX
            said.configs[row.tablet_id] = config_to_pb(Configuration(12, row.config.peers[:2]))
            await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].config.opid_index == 12)
            await w.beat_until(lambda: any(FULL in t["event"] for t in told))
            assert w.catalog.nodes[moved.node_id].machine == "m3"
            refusal = await refused(w.leader.CreateTable(create_request("u"), None))
            assert refusal.code is Code.TOO_LARGE
            w.shift_ms += OPTIONS.forget_after_ms
            await w.beat_until(lambda: not any(t in w.catalog.tablets for t in gone))
            await w.beat_until(lambda: w.catalog.nodes[moved.node_id].machine == moved.machine)
        assert sum(FULL in t["event"] for t in told) == 1


async def test_tablets_that_nobody_makes_leave_room_for_those_that_are_healed(tmp_path: Path) -> None:
    """Each half minute another took its place, and the row of the one before stayed."""
    async with world(tmp_path, bytes_max=BYTES_MAX) as w:
        await ready(w)
        table_id = await made(w, "first", buckets=0)
        (row,) = w.catalog.current_tablets(table_id)
        answer = await w.leader.CreateTable(create_request("second"), None)
        second = answer.table_id.hex()

        def states() -> list[str]:
            return [t.state for t in w.catalog.tablets_of_table(second)]

        await until(lambda: states() == ["CREATING"])
        fill(w, BYTES_MAX * REPLACED_QUARTERS // 4)
        with structlog.testing.capture_logs() as told:
            w.shift_ms += OPTIONS.create_timeout_ms + 1_000
            await w.beat()
            await until(lambda: any(FULL in t["event"] for t in told) or states() != ["CREATING"])
        assert states() == ["CREATING"]
        target = next(n for n in w.nodes if row.config.peer_on(n) is None)
        epoch = await claimed(w)
        asked = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target))
        begun = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
        assert begun.intent.replica_id == 4
        await w.beat_until(lambda: states() == ["RUNNING"])

"""The replication factor of a table: recorded in one batch, refused with the reason, shown in the view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.errors import Code
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    create_request,
    made,
    one_tablet,
    ready,
    ready_again,
    refused,
    world,
)


def asked(factor: int, name: str = "t") -> pb.SetReplicationFactorRequest:
    """A request by name."""
    return pb.SetReplicationFactorRequest(name=name, replication_factor=factor)


async def test_it_is_set_shown_and_kept_by_the_next_leader(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        answer = await w.leader.SetReplicationFactor(asked(5), None)
        assert (answer.table.replication_factor, answer.table.replication_factor_before) == (5, 3)
        await w.leader.SetReplicationFactor(
            pb.SetReplicationFactorRequest(table_id=id_to_pb(table_id), replication_factor=5), None
        )
        await w.elect(MASTERS[1])
        await ready_again(w)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert {t.replication_factor for t in view.tablets if t.table_name == "t"} == {5}
        assert [(t.replication_factor, t.replication_factor_before) for t in view.tables] == [(5, 3)]


@pytest.mark.parametrize("factor", [0, 2, 4, 9])
async def test_another_number_is_refused(tmp_path: Path, factor: int) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w)
        error = await refused(w.leader.SetReplicationFactor(asked(factor), None))
        assert error.code is Code.INVALID_ARGUMENT and "expected 1, 3, 5 or 7" in str(error)


async def test_too_few_machines_room_or_answers_are_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w)
        error = await refused(w.leader.SetReplicationFactor(asked(7), None))
        assert error.code is Code.INVALID_ARGUMENT and "only 5 machines have ACTIVE nodes" in str(error)
        for node in list(w.nodes.values())[:2]:
            node.disk_low = True
        lead = w.lead
        await w.beat_until(lambda: sum(c.full for c in lead.candidates()) == 2)
        error = await refused(w.leader.SetReplicationFactor(asked(5), None))
        assert error.code is Code.INVALID_ARGUMENT and "only 3 machines have a node with room" in str(error)
        assert (await refused(w.leader.SetReplicationFactor(asked(3, "u"), None))).code is Code.NOT_FOUND


async def test_replicas_beyond_the_factor_are_not_added_to_a_larger_one(tmp_path: Path) -> None:
    """Five nodes: a tablet with one more by hand would have wanted six replicas, and waited for ever."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        more = pb.PlaceTabletRequest(tablet_id=id_to_pb(row.tablet_id), what=pb.ADD_REPLICA, replicas=4)
        await w.leader.PlaceTablet(more, None)
        error = await refused(w.leader.SetReplicationFactor(asked(5), None))
        assert error.code is Code.INVALID_ARGUMENT and "release it first, with `stele tablet release`" in str(
            error
        )
        released = pb.PlaceTabletRequest(tablet_id=id_to_pb(row.tablet_id), what=pb.RELEASE_PLACEMENT)
        await w.leader.PlaceTablet(released, None)
        answer = await w.leader.SetReplicationFactor(asked(5), None)
        assert answer.table.replication_factor == 5


async def test_a_smaller_one_needs_no_machines(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, alive_ms=500)) as w:
        await ready(w)
        await made(w, rf=5)
        lead, nodes = w.lead, [n for n in w.catalog.nodes.values() if n.role == "node"]
        await w.beat_until(lambda: not any(map(lead.is_alive, nodes)), silent=tuple(w.nodes))
        answer = await w.leader.SetReplicationFactor(asked(3), None)
        assert answer.table.replication_factor == 3
        late = await refused(w.leader.SetReplicationFactor(asked(5), None))
        assert late.code is Code.NOT_READY and "machines with ACTIVE nodes answer" in str(late)


async def test_a_create_that_is_repeated_after_the_factor_changed_is_done(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        await w.leader.CreateTable(request, None)
        await w.leader.SetReplicationFactor(asked(5), None)
        await w.leader.CreateTable(request, None)
        assert w.catalog.tables["d" * 32].replication_factor == 5

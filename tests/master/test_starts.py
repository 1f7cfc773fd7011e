"""Heartbeats in other nodes' names: a live node is not displaced, what nobody confirmed judges nobody, and nothing lasts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.master.port import swap
from stele.model import bounds
from stele.model.errors import Code, Rejected, StartRefused
from stele.model.ids import ClusterId, NodeId, new_id, start_digest
from stele.rpc.budget import ByteBudget
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerServiceServicer,
    add_TabletServerServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server
from tests.master.harness import CLUSTER, MASTERS, Call, Node, World, heartbeat, ready, refused, until, world


class Status(TabletServerServiceServicer):
    """What a node's process says of itself."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.start = 0
        """0: as an earlier release, which does not name its start."""
        self.asked = 0

    async def GetNodeStatus(self, request: Any, context: Any) -> tserver_pb2.GetNodeStatusResponse:
        self.asked += 1
        return tserver_pb2.GetNodeStatusResponse(
            node_id=id_to_pb(self.identity.node_id),
            incarnation=self.identity.incarnation,
            start_digest=start_digest(self.start) if self.start else 0,
        )


@asynccontextmanager
async def process(node: Node, start: int = 0) -> AsyncIterator[tuple[str, Status]]:
    """The node's process, as far as a master dials it."""
    identity = Identity(ClusterId(CLUSTER), NodeId(node.node_id), node.incarnation)
    status = Status(identity)
    status.start = start
    server = make_server(identity, PeerBook(), ByteBudget())
    add_TabletServerServiceServicer_to_server(status, server)
    port = await bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", status
    finally:
        await server.stop(0)


def beat_of(
    node: Node, address: str, *, incarnation: int, start: int, synced: int = 0
) -> pb.TSHeartbeatRequest:
    request = node.heartbeat(1)
    request.incarnation, request.start, request.registration.address = incarnation, start, address
    request.vetted, request.log_synced = bool(synced), synced
    return request


async def test_a_node_speaks_for_itself_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        for call in (Call(new_id(), 1), Call(), Call(node.node_id, 2)):
            error = await refused(w.leader.TSHeartbeat(node.heartbeat(1), call))
            assert error.code is Code.WRONG_NODE
        other = pb.RegisterNodeRequest(node_id=id_to_pb(node.node_id))
        assert (await refused(w.leader.RegisterNode(other, Call(new_id(), 1)))).code is Code.WRONG_NODE


async def test_a_heartbeat_of_a_node_that_nobody_registered_leaves_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 1)
        known = set(w.catalog.nodes)
        for n in range(100):
            stranger = Node(f"{0xEE00 + n:032x}", "m", "z")
            call = Call(stranger.node_id, 1)
            code = (await refused(w.leader.TSHeartbeat(stranger.heartbeat(1), call))).code
            assert code is Code.NOT_FOUND
            await w.services[MASTERS[1]].TSHeartbeat(stranger.heartbeat(1), call)
        await w.beat()
        w.lead.wake.set()
        await w.beat_until(lambda: True)
        assert set(w.catalog.nodes) == known and set(w.lead.liveness.nodes) <= known
        # A follower may lack rows, and cannot tell: it hears a bounded number, until it leads.
        assert len(w.masters[MASTERS[1]].liveness.nodes) > 100
        await w.elect(MASTERS[1])
        await w.beat()
        assert set(w.catalog.nodes) == known and set(w.lead.liveness.nodes) <= known


async def test_nodes_that_never_come_are_registered_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "NODES_UNFORMED_MAX", 2)
    async with world(tmp_path) as w:
        await ready(w, 3)

        async def register() -> None:
            await w.leader.RegisterNode(pb.RegisterNodeRequest(node_id=id_to_pb(new_id())), Call())

        await register()
        await register()
        assert "have never started" in str(await refused(register()))


async def test_nodes_that_are_registered_at_once_keep_to_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was counted before the others were on record, so a burst of them left rows without end."""
    monkeypatch.setattr(bounds, "NODES_UNFORMED_MAX", 2)
    async with world(tmp_path) as w:
        await ready(w, 3)
        requests = [pb.RegisterNodeRequest(node_id=id_to_pb(new_id())) for _ in range(12)]
        told = await asyncio.gather(
            *(w.leader.RegisterNode(request, Call()) for request in requests), return_exceptions=True
        )
        assert sum(isinstance(answer, Rejected) for answer in told) == 10
        assert sum(not node.formed for node in w.catalog.nodes.values()) == 2


async def test_a_later_start_waits_for_the_end_of_one_that_still_answers(tmp_path: Path) -> None:
    """One heartbeat with a higher number, in its name: it ended, and its volume was never to be used again."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        node.incarnation = 7
        service = w.leader
        async with process(node) as (address, _):
            await heartbeat(service, beat_of(node, address, incarnation=7, start=70))
            error = await refused(heartbeat(service, beat_of(node, "evil:1", incarnation=8, start=80)))
            assert isinstance(error, StartRefused) and error.code is Code.STALE_INCARNATION
            assert (error.master, error.masters, error.newest) == (MASTERS[0], 3, 7)
            assert "still answers at" in str(error)
            await heartbeat(service, beat_of(node, address, incarnation=7, start=70))
        node.incarnation = 8
        async with process(node) as (later, _):
            await heartbeat(service, beat_of(node, later, incarnation=8, start=80))
            assert (
                await refused(heartbeat(service, beat_of(node, address, incarnation=7, start=70)))
            ).code is (Code.STALE_INCARNATION)


async def test_a_master_that_begins_believes_no_later_start_that_does_not_answer(tmp_path: Path) -> None:
    """One forged heartbeat, before the first true one, kept the true node out until this master restarted."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        node.incarnation = 7
        service, liveness = w.leader, w.masters[MASTERS[0]].liveness
        async with process(node) as (address, _):
            for forged in ("127.0.0.1:1", address, ""):
                liveness.nodes.clear()  # as it begins
                await heartbeat(service, beat_of(node, forged, incarnation=1 << 62, start=5, synced=1 << 60))
                true = beat_of(node, address, incarnation=7, start=70, synced=900)
                await heartbeat(service, true)
                life = liveness.nodes[node.node_id]
                assert (life.incarnation, life.heard) == (7, True)
                assert life.registration is not None and life.registration.address == address
                error = await refused(heartbeat(service, beat_of(node, forged, incarnation=1 << 62, start=5)))
                assert "still answers at" in str(error)


async def test_a_later_start_that_answers_refuses_an_earlier_one_from_its_first_heartbeat_on(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        node.incarnation = 8
        liveness = w.masters[MASTERS[0]].liveness
        async with process(node) as (address, status):
            liveness.nodes.clear()
            await heartbeat(w.leader, beat_of(node, address, incarnation=8, start=80))
            for _ in range(3):
                earlier = beat_of(node, "127.0.0.1:1", incarnation=7, start=70)
                assert (await refused(heartbeat(w.leader, earlier))).code is Code.STALE_INCARNATION
            assert status.asked == 1, "once for each start"
            assert liveness.nodes[node.node_id].incarnation == 8


async def test_a_start_of_another_name_and_the_same_number_neither_displaces_a_node_nor_speaks_for_it(
    tmp_path: Path,
) -> None:
    """The node itself confirmed its number to the master: then a forged log position counted, and the node, whose
    volume is shorter, was refused as an older copy for ever."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        node.incarnation = 7
        master = w.masters[MASTERS[0]]
        async with process(node, start=70) as (address, _):
            forged = beat_of(node, address, incarnation=7, start=5, synced=1 << 60)
            true = beat_of(node, address, incarnation=7, start=70, synced=900)
            for _ in range(3):  # it comes before the node's own
                await heartbeat(w.leader, forged)
                await until(lambda: not master.starts._proving)
            life = master.liveness.nodes[node.node_id]
            assert not life.proven and life.last_start is None
            await heartbeat(w.leader, true)
            error = await refused(heartbeat(w.leader, forged))
            assert error.code is Code.STALE_INCARNATION and "still answers at" in str(error)
            assert life.start == 70
            await until(lambda: life.proven)
            await heartbeat(w.leader, true)
            assert life.last_start == (7, 70, 900)
            assert (await refused(heartbeat(w.leader, forged))).code is Code.VOLUME_OLD


async def test_a_start_that_the_catalog_knows_as_an_earlier_one_is_refused_before_anybody_is_called(
    tmp_path: Path,
) -> None:
    """It made a master call the node, and forget it where the call failed."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        node.incarnation = 7
        row = w.catalog.nodes[node.node_id]
        await w.lead.commit([swap(row, replace(row, incarnation=7, start=70))])
        life = w.masters[MASTERS[0]].liveness.nodes[node.node_id]
        await heartbeat(w.leader, beat_of(node, "127.0.0.1:1", incarnation=7, start=70))
        earlier = beat_of(node, "127.0.0.1:1", incarnation=3, start=30)
        assert (await refused(heartbeat(w.leader, earlier))).code is Code.STALE_INCARNATION
        assert (life.incarnation, life.start, life.heard) == (7, 70, True)


async def test_a_restart_at_the_same_address_is_welcome_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        async with process(node) as (address, status):
            node.incarnation = 7
            status.identity = replace(status.identity, incarnation=7)
            await heartbeat(w.leader, beat_of(node, address, incarnation=7, start=70))
            node.incarnation = 8
            status.identity = replace(status.identity, incarnation=8)
            await heartbeat(w.leader, beat_of(node, address, incarnation=8, start=80))


async def test_a_flood_of_forged_heartbeats_keeps_no_true_start_out(tmp_path: Path) -> None:
    """One call to the node is made at once. Whoever comes meanwhile was sent away, so forged ones always came first."""

    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with world(tmp_path) as w:
            await _flooded(w, f"127.0.0.1:{silent.getsockname()[1]}")


async def _flooded(w: World, silent: str) -> None:
    await ready(w, 1)
    (node,) = w.nodes.values()
    await heartbeat(w.leader, beat_of(node, silent, incarnation=7, start=70))
    forged = [
        asyncio.create_task(heartbeat(w.leader, beat_of(node, "evil:1", incarnation=8, start=n)))
        for n in range(1, 4)
    ]
    await asyncio.sleep(0.05)
    async with process(node, start=80) as (own, status):
        status.identity = replace(status.identity, incarnation=8)
        node.incarnation = 8
        await heartbeat(w.leader, beat_of(node, own, incarnation=8, start=80))
        assert w.masters[MASTERS[0]].liveness.nodes[node.node_id].start == 80
        await asyncio.gather(*forged, return_exceptions=True)


async def test_what_a_start_tells_of_its_log_counts_once_its_process_confirms_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        life = w.masters[MASTERS[0]].liveness.nodes[node.node_id]
        forged = beat_of(node, "127.0.0.1:1", incarnation=6, start=60, synced=1 << 60)
        for _ in range(3):
            await heartbeat(w.leader, forged)
            await until(lambda: not w.masters[MASTERS[0]].starts._proving)
        assert life.last_start is None
        node.incarnation = 7
        async with process(node) as (address, status):
            true = beat_of(node, address, incarnation=7, start=70, synced=900)
            await heartbeat(w.leader, true)
            await until(lambda: life.proven)
            await heartbeat(w.leader, true)
            assert life.last_start == (7, 70, 900)
            asked = status.asked
            await heartbeat(w.leader, true)
            assert status.asked == asked, "once for each start"


async def test_a_master_knows_that_it_runs_itself(tmp_path: Path) -> None:
    """A copy of a master's volume, started elsewhere, told the original that it was its later start."""
    async with world(tmp_path) as w:
        w.pool.identity = replace(w.pool.identity, node_id=NodeId(MASTERS[0]), incarnation=5)
        copy = Node(MASTERS[0], "m", "z")
        error = await refused(heartbeat(w.leader, beat_of(copy, "elsewhere:1", incarnation=6, start=60)))
        assert isinstance(error, Rejected) and error.code is Code.STALE_INCARNATION
        await heartbeat(w.leader, beat_of(copy, "here:1", incarnation=5, start=50))

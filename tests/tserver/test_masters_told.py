"""Which addresses a node sends heartbeats to: one for each master, and few to names that are nobody's any more."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stele.model.ids import ClusterId, NodeId, ReplicaId, StreamKey, TabletId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto.master_pb2_grpc import (
    MasterServiceServicer,
    add_MasterServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server
from stele.tserver.node import Node, start_node
from stele.tserver.options import NodeOptions
from tests.consensus.cluster import OPTIONS, wait_until
from tests.harness.loopback import Loopback

BEAT_S = 0.02
PORT = 7051


class FakeMaster(MasterServiceServicer):
    """Answers heartbeats and remembers over which connection they came."""

    def __init__(self, cluster_id: ClusterId, *, leads: bool) -> None:
        self.node_id = NodeId(new_id())
        self.cluster_id = cluster_id
        self.leads = leads
        self._loopback = Loopback()
        self.host = f"{self._loopback.prefix}.1"
        self.address = f"{self.host}:{PORT}"
        self.listed: list[tuple[NodeId, str]] = []
        self.asks_again = False  # for what it was told already
        self.heard: Counter[str] = Counter()
        self.reports: Counter[str] = Counter()
        self.told: list[tuple[bool, list[str]]] = []
        """Of each report: whether it was a full one, and the tablets that are gone."""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = make_server(Identity(self.cluster_id, self.node_id, 1), PeerBook(), ByteBudget())
        add_MasterServiceServicer_to_server(self, self._server)
        await bind(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def RegisterNode(self, request: Any, context: Any) -> pb.RegisterNodeResponse:
        return pb.RegisterNodeResponse()

    async def TSHeartbeat(self, request: Any, context: Any) -> pb.TSHeartbeatResponse:
        self.heard[context.peer()] += 1
        self.reports[context.peer()] += request.has_report
        if request.has_report:
            self.told.append((not request.incremental, [id_from_pb(t) for t in request.removed_tablets]))
        return pb.TSHeartbeatResponse(
            is_leader=self.leads,
            term=1,
            node_id=id_to_pb(self.node_id),
            node_state=pb.ACTIVE,
            needs_reregister=self.asks_again,
            needs_full_report=self.asks_again,
            masters=[pb.MasterInfoPB(node_id=id_to_pb(n), address=a) for n, a in self.listed],
        )


class Names:
    """The resolver: names to addresses; the others do not resolve. `asked` counts the lookups of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        real = socket.getaddrinfo

        def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
            if not str(host).endswith(".test"):
                return real(host, *arguments, **options)
            self.asked[host] += 1
            if host not in self.known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return real(self.known[host], *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", lookup)


@asynccontextmanager
async def beating(directory: Path, given: tuple[str, ...], *masters: FakeMaster) -> AsyncIterator[Node]:
    """A node that was given these addresses, and the masters that run."""
    options = NodeOptions(
        data_dir=directory / "node",
        node_id=NodeId(new_id()),
        cluster_id=masters[0].cluster_id,
        listen="127.0.0.1:0",
        masters=given,
        machine="m",
        zone="z",
        http_port=0,
        flight_port=0,
        stream_port=0,
        heartbeat_s=BEAT_S,
        replica=OPTIONS,
    )
    try:
        node = await start_node(options)
        try:
            yield node
        finally:
            await node.stop()
    finally:
        for master in masters:
            await master.stop()


async def made(count: int) -> list[FakeMaster]:
    """Masters of one cluster, the first of which leads."""
    cluster_id = ClusterId(new_id())
    masters = [FakeMaster(cluster_id, leads=number == 0) for number in range(count)]
    for master in masters:
        await master.start()
        master.listed = [(m.node_id, m.address) for m in masters]
    return masters


def heard(master: FakeMaster, beats: int) -> Callable[[], bool]:
    """Whether it heard so many more from now on."""
    start = master.heard.total()
    return lambda: master.heard.total() >= start + beats


async def test_a_master_that_has_a_name_and_an_address_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops shared one number of their heartbeats, and where they arrived swapped the master asked for all reports."""
    names = Names(monkeypatch)
    (master,) = await made(1)
    names.known["master.test"] = master.host
    async with beating(tmp_path, (f"master.test:{PORT}",), master):
        await wait_until(lambda: len(master.heard) == 2)
        await wait_until(heard(master, 10))
        early = master.heard.copy()
        await wait_until(heard(master, 60))
        assert min(master.heard[c] - early[c] for c in early) <= 10


async def test_a_name_tells_where_the_address_that_the_leader_knows_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    (master,) = await made(1)
    names.known["master.test"] = master.host
    master.listed = [(master.node_id, f"127.0.0.2:{PORT}")]
    async with beating(tmp_path, (f"master.test:{PORT}",), master):
        await wait_until(heard(master, 60))
        assert master.reports.total() > 0


async def test_a_name_of_nobody_is_looked_up_less_and_less_often_and_found_when_it_is_a_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    leader, other = await made(2)
    leader.listed = leader.listed[:1]
    async with beating(tmp_path, (leader.address, f"retired.test:{PORT}"), leader, other):
        await wait_until(lambda: names.asked["retired.test"] > 0)
        before = names.asked["retired.test"]
        await wait_until(heard(leader, 80))
        assert names.asked["retired.test"] - before <= 20
        names.known["retired.test"] = other.host
        await wait_until(lambda: other.heard.total() > 0)
        await wait_until(heard(other, 20))


async def test_every_name_is_asked_each_time_while_fewer_than_a_majority_of_the_masters_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    leader, second, third = await made(3)
    await second.stop()
    await third.stop()
    async with beating(tmp_path, (leader.address, "another.test:7051"), leader):
        await wait_until(lambda: leader.heard.total() > 0)
        await wait_until(lambda: names.asked["another.test"] >= 40)


async def test_a_master_that_is_one_is_asked_each_time_however_long_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come to lead, and would take the nodes for silent until they ask again."""
    names = Names(monkeypatch)
    leader, second = await made(2)
    away = (NodeId(new_id()), "away.test:7051")
    leader.listed = [*leader.listed, away]
    async with beating(tmp_path, (leader.address, second.address), leader, second):
        await wait_until(lambda: leader.heard.total() > 0)
        await wait_until(lambda: names.asked["away.test"] >= 40)


async def test_a_master_that_only_a_follower_names_is_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may have come to another address, which followers know; one of them may have old news."""
    names = Names(monkeypatch)
    follower, leader = await made(2)
    follower.leads, leader.leads = False, True
    away = (NodeId(new_id()), "away.test:7051")
    leader.listed = [(follower.node_id, follower.address), (leader.node_id, leader.address)]
    follower.listed = [away, *leader.listed[:1]]
    async with beating(tmp_path, (follower.address,), follower, leader):
        await wait_until(lambda: names.asked["away.test"] >= 40)
        assert not leader.heard
        follower.listed.append(leader.listed[1])
        await wait_until(heard(leader, 20))
        before = names.asked["away.test"]
        await wait_until(lambda: names.asked["away.test"] >= before + 40)
        follower.listed.remove(away)
        await wait_until(heard(follower, 20))
        before = names.asked["away.test"]
        await wait_until(heard(leader, 20))
        assert names.asked["away.test"] - before <= 2


def changes(node: Node, count: int) -> list[StreamKey]:
    """Replicas that came and went again."""
    keys = [StreamKey(TabletId(new_id()), ReplicaId(1)) for _ in range(count)]
    for key in keys:
        node.host.changed_key(key)
    return keys


async def test_a_master_that_asks_again_and_again_is_not_told_without_rest(tmp_path: Path) -> None:
    """A pause is 50 ms at least."""
    (leader,) = await made(1)
    leader.asks_again = True
    async with beating(tmp_path, (leader.address,), leader):
        await wait_until(heard(leader, 5))
        began, before = asyncio.get_running_loop().time(), leader.heard.total()
        await wait_until(heard(leader, 20))
        passed_s = asyncio.get_running_loop().time() - began
        assert leader.heard.total() - before <= 2 + passed_s / 0.05


async def test_what_changes_is_not_kept_for_a_name_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, each replica that ever was made here, for as long as the node ran: --masters name a replaced master for ever."""
    names = Names(monkeypatch)
    (leader,) = await made(1)
    async with beating(tmp_path, (leader.address, "retired.test:7051"), leader) as node:
        await wait_until(lambda: leader.reports.total() > 0 and names.asked["retired.test"] > 0, 60)
        told = {key.tablet_id for key in changes(node, 100)}
        await wait_until(lambda: told <= {t for _, gone in leader.told for t in gone}, 60)
        await wait_until(lambda: not node.heartbeater._loops["retired.test:7051"]._dirty, 60)


async def test_a_leader_that_was_away_while_much_changed_is_told_all_anew(tmp_path: Path) -> None:
    """Not each change, of which nothing is kept beyond what a full report says."""
    (leader,) = await made(1)
    async with beating(tmp_path, (leader.address,), leader) as node:
        await wait_until(lambda: bool(leader.told), 60)
        changes(node, 1)
        await wait_until(lambda: not leader.told[-1][0], 60)
        await leader.stop()
        loop = node.heartbeater._loops[leader.address]
        await wait_until(lambda: not loop.answers, 60)
        changes(node, 100)
        await wait_until(lambda: not loop._dirty, 60)
        leader.told.clear()
        await leader.start()
        await wait_until(lambda: bool(leader.told), 60)
        assert leader.told[0] == (True, [])

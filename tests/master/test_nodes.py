"""Three masters on the in-memory port: nodes register, are formed, are known by their addresses and clocks, and retire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stele.driver.wire import view_from_pb
from stele.master.liveness import Liveness
from stele.master.service import MasterService
from stele.model.errors import Code, Rejected
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import PeerBook
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    Call,
    claimed,
    heartbeat,
    no_formation,
    one_tablet,
    ready,
    refused,
    until,
    world,
)
from tests.master.test_starts import process


async def test_a_master_says_what_most_clocks_say(tmp_path: Path) -> None:
    """Of those it hears, each by what it measured on this master's monotonic clock; not before it can have heard all."""
    async with world(tmp_path, replace(OPTIONS, alive_ms=300)) as w:
        w.add_nodes(4)
        master = w.masters[w.group.leader]
        hour_us = 3_600_000_000
        answers: dict[str, pb.TSHeartbeatResponse] = {}

        async def beat(*aheads_us: int) -> None:
            for node, ahead_us in zip(w.nodes.values(), aheads_us, strict=True):
                request = node.heartbeat(next(w._sequence))
                if answer := answers.get(node.node_id):
                    request.clock_id = answer.clock_id
                    request.wall_base_us = answer.wall_us - answer.clock_us + ahead_us
                    request.wall_ahead_us = ahead_us
                answers[node.node_id] = await heartbeat(w.leader, request)

        def said() -> int | None:
            answer = answers[next(reversed(w.nodes))]
            return answer.wall_agreed_us - answer.wall_us if answer.HasField("wall_agreed_us") else None

        await beat(0, 0, 0, 0)
        assert said() is None
        await until(lambda: master.now_ms() - master.liveness.began_ms >= 300)
        await beat(hour_us, hour_us, hour_us, 0)  # this master's own is wrong, and one node's
        assert said() is not None and abs(said() - hour_us) < 1_000_000  # type: ignore[operator]
        await beat(0, hour_us, -hour_us, 0)
        assert said() is not None and abs(said()) < 1_000_000  # type: ignore[arg-type]
        await beat(hour_us, hour_us, hour_us // 2, 0)
        assert said() is None
        w.shift_ms += 60_000  # it hears nobody any more: its own clock alone is no majority
        await beat(hour_us, hour_us, hour_us, hour_us)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert sorted(n.wall_ahead_us for n in view.nodes if n.HasField("wall_ahead_us")) == [hour_us] * 4


async def test_a_master_knows_where_its_callers_are_also_if_it_does_not_lead(tmp_path: Path) -> None:
    """Whoever registered before it started is asked again; a start that it refuses changes nothing."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        follower = next(n for n in MASTERS if n != w.group.leader)
        service = MasterService(w.masters[follower], no_formation, book := PeerBook())
        w.masters[follower].liveness = Liveness(0)

        async def beat(incarnation: int, address: str = "") -> bool:
            request = node.heartbeat(1)
            request.incarnation = incarnation
            request.registration.address = address
            if not address:
                request.ClearField("registration")
            answer = await heartbeat(service, request)
            assert not answer.is_leader
            return bool(answer.needs_reregister)

        node.incarnation = 7
        async with process(node) as (address, status):
            assert await beat(7) and book.address(node.node_id) == ""
            assert not await beat(7, address) and book.address(node.node_id) == address
            assert not await beat(7) and book.address(node.node_id) == address
            assert (await refused(beat(6, "h6:1"))).code is Code.STALE_INCARNATION
            assert book.address(node.node_id) == address
            status.identity = replace(status.identity, incarnation=8)
            assert not await beat(8, "h8:1") and book.address(node.node_id) == "h8:1"


async def test_a_node_retires_only_when_nothing_names_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 5)
        row = await one_tablet(w)
        named = row.config.peers[0].node_id
        assert (await refused(w.move(named, pb.RETIRED))).code is Code.INVALID_ARGUMENT
        await w.move(named, pb.DRAINING)
        assert (await refused(w.move(named, pb.RETIRED))).code is Code.UNSAFE_CHANGE
        free = next(n for n in w.nodes if row.config.peer_on(n) is None)
        await w.move(free, pb.DRAINING)
        await w.move(free, pb.RETIRED)
        assert (await refused(w.move(free, pb.ACTIVE))).code is Code.INVALID_ARGUMENT
        master = await refused(w.move(MASTERS[0], pb.RETIRED))
        assert master.code is Code.INVALID_ARGUMENT
        await w.move(MASTERS[0], pb.DRAINING)
        assert (await refused(w.move(MASTERS[0], pb.RETIRED))).code is Code.UNSAFE_CHANGE


async def test_a_registered_node_is_formed_once_it_was_heard(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.add_nodes(1)
        (node,) = w.nodes
        register = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="node", name="n-1")
        assert not (await w.leader.RegisterNode(register, Call())).formed
        assert not (await w.leader.RegisterNode(register, Call())).formed
        await w.beat_until(lambda: w.catalog.nodes[node].formed)
        assert (await w.leader.RegisterNode(register, Call())).formed
        other = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="master")
        assert isinstance(await refused(w.leader.RegisterNode(other, Call())), Rejected)


async def test_a_node_holds_nothing_before_its_row_says_that_it_is_formed(tmp_path: Path) -> None:
    """It was heard, and given a replica at once. Its volume lost then, it was told to format another under the same id: with that
    it might have voted twice in a term."""
    async with world(tmp_path) as w:
        await ready(w, 3)
        row, epoch = await one_tablet(w), await claimed(w)
        w.add_nodes(1)
        node = next(reversed(w.nodes))
        register = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="node")
        asked = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(node))
        begin = pb.BeginIntentRequest(epoch=epoch, intent=asked)
        await w.leader.RegisterNode(register, Call())
        async with w.lead.locks.hold(tables=(f"node/{node}",)):
            await w.beat()
            view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
            seen = view_from_pb(view).node(node)
            assert seen is not None and seen.ever_heard and not seen.formed
            assert node not in {c.node_id for c in w.lead.candidates()}
            assert (await refused(w.leader.BeginIntent(begin, None))).code is Code.NOT_READY
        await w.beat_until(lambda: w.catalog.nodes[node].formed)
        assert (await w.leader.RegisterNode(register, Call())).formed, "its volume is lost, not new"
        assert node in {c.node_id for c in w.lead.candidates()}
        assert (await w.leader.BeginIntent(begin, None)).intent.replica_id == 4

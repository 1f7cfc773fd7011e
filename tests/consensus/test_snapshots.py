"""Snapshots over changes of leaders: what was said to be ready stays as it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from stele.consensus.replica import Replica, ReplicaState
from stele.model.clock import from_physical_us
from stele.model.errors import Retryable, SteleError
from stele.model.ids import NodeId, ReplicaId
from stele.raft.effects import Role
from stele.raft.messages import Message, UpdateRequest
from tests.consensus.cluster import Group, Network, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


class Links(Network):
    """Carries what `passes(sender, to, entries)` lets pass, by replica ids."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: Callable[[int, int, bool], bool] = lambda sender, to, entries: True

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        entries = isinstance(message, UpdateRequest) and bool(message.entries)
        return self.passes(from_, to_, entries) and super().carries(sender, to, tablet, from_, to_, message)


async def test_a_snapshot_waits_for_the_writes_below_it_that_are_under_way(group_of: MakeGroup) -> None:
    network = Links()
    group, _ = await group_of(3, network=network)
    for _ in range(
        20
    ):  # a slow machine may depose the leader meanwhile, or leave the write without a timestamp
        network.passes = lambda sender, to, entries: True
        await group.write(rows([1]))
        leader = await group.leader()
        term = leader.term
        network.passes = lambda sender, to, entries: not entries
        with contextlib.suppress(SteleError):
            written = leader.writes.submit(rows([777]))
            written.add_done_callback(lambda done: done.exception())
            await asyncio.sleep(0.02)
        if not leader.writes.proposals.in_log:
            continue
        (proposal,) = leader.writes.proposals.in_log.values()
        asked = asyncio.create_task(leader.reads.snapshot_ready(proposal.timestamp, 30_000))
        await asyncio.wait([asked], timeout=0.2)
        if (leader.role, leader.term) == (Role.LEADER, term):
            break
    assert not asked.done()
    network.passes = lambda sender, to, entries: True
    await asked
    assert 777 in table(leader, proposal.timestamp)
    await written


async def test_no_read_is_answered_as_of_the_future(group_of: MakeGroup) -> None:
    """Where commits take long, ceilings run far ahead, and a new leader's own follows on its predecessor's. A client that read
    there scans at no lower time: the other tablets' leaders called that clock wrong."""
    group, nodes = await group_of(3)
    others = await Group(nodes).create()
    ceiling = 0
    while ceiling < from_physical_us(nodes[0].wall_us() + 2_000_000):
        await group.write(rows([1]))
        old = await group.leader()
        old.writes.timestamps._run_ahead(4_000_000)
        ceiling = old.writes.timestamps._committed
    await old.members.transfer_leadership()
    await wait_until(lambda: any(r.is_leader for r in group.replicas() if r is not old))
    new = await group.leader()
    now = asyncio.create_task(new.reads.snapshot_ready(from_physical_us(new.host.wall_us())))
    await wait_until(lambda: new.writes.timestamps._committed > ceiling)
    for _ in range(20):
        snapshot = await new.reads.latest_snapshot()
        assert snapshot <= from_physical_us(new.host.wall_us())
        await (await others.leader()).reads.snapshot_ready(snapshot)
        assert table(new, snapshot) == {1: "x1"}
        await asyncio.sleep(0.01)
    await now


async def test_a_leader_that_lost_the_lead_meanwhile_and_won_it_back_says_ready_of_no_snapshot_yet(
    group_of: MakeGroup,
) -> None:
    """1 waits to apply; its write 777 is on 2 as well. 3, 4 or 5 leads, and 1 drops 777. 1 leads again: it knows of no write
    at or below the snapshot, and 2 may still be elected and commit 777."""
    network = Links()
    group, _ = await group_of(5, network=network)
    await group.write(rows([1]))
    first = await group.leader()
    if first.replica_id != 1:
        await first.members.transfer_leadership(ReplicaId(1))
    replicas = {number: group.replica(number) for number in range(1, 6)}
    one, two = replicas[1], replicas[2]
    await wait_until(lambda: one.is_leader and one.state is ReplicaState.RUNNING)
    await one.writes.propose(rows([2]), deadline_ms=5_000)
    backlog = _Backlog(one)

    network.passes = lambda sender, to, entries: {sender, to} == {1, 2}
    lost = one.writes.submit(rows([777]))
    lost.add_done_callback(lambda done: done.exception())
    await wait_until(lambda: bool(one.writes.proposals.in_log))
    (proposal,) = one.writes.proposals.in_log.values()
    at, snapshot = proposal.opid.index, proposal.timestamp
    asked = asyncio.create_task(one.reads.snapshot_ready(snapshot))
    await wait_until(lambda: two.core.log.durable_index >= at)

    network.passes = lambda sender, to, entries: {sender, to} <= {3, 4, 5} and not entries
    await wait_until(lambda: any(leads(replicas[number]) for number in (3, 4, 5)))
    second = next(number for number in (3, 4, 5) if leads(replicas[number]))
    network.passes = lambda sender, to, entries: 2 not in (sender, to) and (not entries or to == 1)
    await wait_until(lambda: one.core.log.term_at(at) == replicas[second].term)
    network.passes = lambda sender, to, entries: 2 not in (sender, to) and not entries
    moved = asyncio.create_task(_hand_over(replicas[second], to=one))
    await wait_until(lambda: leads(one))
    backlog.applied()
    await asyncio.wait([asked], timeout=0.2)
    said_ready = asked.done() and asked.exception() is None
    before = set(table(one, snapshot))

    network.passes = lambda sender, to, entries: not {sender, to} & {1, second}
    await wait_until(lambda: two.is_leader and two.state is ReplicaState.RUNNING)
    await wait_until(lambda: two.applied_index >= at)
    assert 777 in table(two, snapshot)  # else nothing was shown
    assert not said_ready or before == set(table(two, snapshot))
    for task in (asked, moved):
        task.cancel()
    for ended in await asyncio.gather(asked, moved, return_exceptions=True):
        assert isinstance(ended, (SteleError, asyncio.CancelledError, type(None)))


async def _hand_over(leader: Replica, *, to: Replica) -> None:
    """Until `to` leads: on a slow disk a transfer ends before its target has synced what it lacked."""
    while not leads(to):
        with contextlib.suppress(Retryable):
            await leader.members.transfer_leadership(to.replica_id)
        await asyncio.sleep(0.05)


def leads(replica: Replica) -> bool:
    return replica.role is Role.LEADER


class _Backlog:
    """Holds up whoever waits for what is applied at a replica, as a long log that is replayed does."""

    def __init__(self, replica: Replica) -> None:
        assert replica.started is not None
        self._event = asyncio.Event()
        self._wait = replica.started.applier.wait
        replica.started.applier.wait = self._held  # type: ignore[method-assign]

    def applied(self) -> None:
        """It is over."""
        self._event.set()

    async def _held(self, index: int) -> None:
        await self._event.wait()
        await self._wait(index)

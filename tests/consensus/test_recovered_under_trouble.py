"""A tablet that lost its majority goes on from the most advanced survivor, and grows again; the lost ones return one by one.

Real logs and stores, random cuts and restarts. Writes go to whoever leads, in both incarnations. Invariants: no row that the
new incarnation acknowledged is lost; none that only the old one has since is there; no two lead one incarnation in a term.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from stele.consensus.recovering import SoleVoter
from stele.consensus.replica import Replica
from stele.model.config import MemberType
from stele.model.errors import SteleError
from stele.model.ids import OpId
from stele.model.incarnation import raised, recoveries
from tests.consensus import copies
from tests.consensus.cluster import Group, TestNode, leads, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

VOTERS, SPARE, LOST = 5, 2, 3
STEPS = 24


class Story:
    """What was asked of the group, and what it said."""

    def __init__(self, group: Group, rng: random.Random) -> None:
        self.group = group
        self.rng = rng
        self.number = 0
        self.asked: dict[int, set[int]] = {0: set(), 1: set()}
        self.acknowledged: dict[int, set[int]] = {0: set(), 1: set()}
        self._led: dict[tuple[int, int], int] = {}

    async def write(self) -> None:
        """One row to each replica that takes itself for the leader."""
        for replica in self.group.replicas():
            if not replica.is_leader:
                continue
            incarnation, self.number = recoveries(replica.superblock.tablet_incarnation), self.number + 1
            who = self._led.setdefault((incarnation, replica.term), replica.replica_id)
            assert who == replica.replica_id, "two leaders in one term of one incarnation"
            self.asked[incarnation].add(self.number)
            try:
                await replica.writes.propose(rows([self.number], f"i{incarnation}-"), 300)
            except SteleError:
                continue  # unknown, or refused
            self.acknowledged[incarnation].add(self.number)

    async def trouble(self) -> None:
        """Some are cut off for a moment; at times one of them is restarted."""
        nodes = self.group.nodes
        there = [at for at, node in enumerate(nodes) if not node.stopped]
        nodes[0].network.cut = {nodes[at].node_id for at in there if self.rng.random() < 0.25}
        if self.rng.random() < 0.3:
            at = self.rng.choice(there)
            nodes[at] = await nodes[at].restart()
        await asyncio.sleep(self.rng.random() * 0.25)


def log_end(replica: Replica) -> OpId:
    assert replica.core is not None
    return replica.core.status().last_logged


async def grown(group: Group, source: TestNode, spares: list[TestNode]) -> None:
    """A copy on each spare node, which votes."""

    def votes(number: int) -> bool:
        peer = group.replica(number).committed_config.peer(number)
        return peer is not None and peer.votes

    for number, spare in enumerate(spares, VOTERS + 1):
        await copies.installed(await copies.start(group, source, spare, number))
        await copies.add(group, spare, number, member_type=MemberType.NON_VOTER, promote=True)
        await wait_until(partial(votes, number))


@pytest.mark.usefixtures("quick_elections")
@pytest.mark.parametrize("seed", range(3))
async def test_the_most_advanced_survivor_goes_on_and_the_lost_ones_return(
    group_of: MakeGroup, seed: int
) -> None:
    rng = random.Random(seed)
    group, nodes = await group_of(VOTERS, spare=SPARE)
    group.nodes = nodes  # the spare ones, too
    story, network = Story(group, rng), nodes[0].network
    await group.leader()
    for _ in range(8):
        await story.write()
        await story.trouble()
    network.cut.clear()

    gone = rng.sample(range(VOTERS), LOST)
    for at in gone:
        await nodes[at].stop()
    left = [group.replica(at + 1) for at in range(VOTERS) if at not in gone]
    survivor = max(left, key=log_end)
    number, home = survivor.replica_id, nodes[survivor.replica_id - 1]
    order = SoleVoter(survivor.superblock.key, raised(0), max(r.term for r in left) + 1, log_end(survivor))
    await home.manager.make_sole_voter(order)
    await wait_until(lambda: leads(group.replica(number)))
    kept = set(table(group.replica(number)))
    await grown(group, home, nodes[VOTERS:])

    for step in range(STEPS):
        if gone and step % 5 == 0:
            at = gone.pop()
            nodes[at] = await nodes[at].restart()
        await story.write()
        await story.trouble()
    network.cut.clear()
    new = {number, *range(VOTERS + 1, VOTERS + SPARE + 1)}
    await wait_until(lambda: any(leads(group.replica(n)) for n in new))
    await wait_until(lambda: not any(r.is_leader for r in group.replicas() if r.replica_id not in new))
    await story.write()
    leader = next(group.replica(n) for n in new if leads(group.replica(n)))
    for replica in map(group.replica, new):
        await wait_until(lambda replica=replica: replica.applied_index >= leader.applied_index)  # type: ignore[misc]
        found = set(table(replica))
        assert story.acknowledged[1] <= found <= kept | story.asked[1]
    assert story.acknowledged[1]

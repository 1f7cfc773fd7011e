"""What a driver keeps between its passes of the loads of leaders equals what it would work out anew."""

from __future__ import annotations

import random
from dataclasses import replace

from stele.driver.executor import Executor
from stele.driver.leader_trials import CALM_MS, LeaderTrials
from stele.driver.steps import MoveLeader
from stele.driver.trials import Trials
from stele.driver.view import TabletView
from stele.model.ids import NodeId
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from tests.driver.test_known import POLICY, Twin, cluster_of


def with_load(t: TabletView, rng: random.Random) -> TabletView:
    """The tablet with another load of one of its replicas."""
    one, load = rng.randrange(len(t.replicas)), rng.choice((0, 0, 300, 1_000, 5_000))
    return replace(
        t, replicas=tuple(replace(r, load=load) if k == one else r for k, r in enumerate(t.replicas))
    )


def test_loads_that_change_at_random() -> None:
    """Known loads, and that nothing was found to exchange, must be forgotten as soon as anything that decides it changes."""
    exchanged = 0
    for seed in range(10):
        rng, twin = random.Random(seed), Twin()
        view = cluster_of(rng.randint(6, 14))
        view = replace(view, nodes=tuple(replace(n, load=0) for n in view.nodes))
        for _ in range(80):
            tablets, nodes = list(view.tablets), list(view.nodes)
            at, of = rng.randrange(len(nodes)), rng.randrange(len(tablets))
            if rng.random() < 0.9:
                tablets[of] = with_load(tablets[of], rng)
            else:
                peer = rng.choice(tablets[of].config.peers)
                kept = rng.choice((0, 0, 0, 200))
                tablets[of] = replace(tablets[of], leader_node=peer.node_id, leader_kept_until_us=kept)
            if rng.random() < 0.1:
                nodes = [replace(n, load=1) for n in nodes]
                nodes[at] = replace(nodes[at], load=rng.choice((None, 0, 0, 2)))
            elif rng.random() < 0.1:
                nodes[at] = replace(nodes[at], zone=rng.choice(("z0", "z1")))
            view = replace(view, tablets=tuple(tablets), nodes=tuple(nodes))
            calm = frozenset(t.tablet_id for t in tablets if rng.random() < 0.1)
            calm = calm if rng.random() < 0.3 else frozenset()
            leaders = LeaderTrials(left=rng.choice((1, 100, 100, 100)), loads=rng.random() < 0.9, calm=calm)
            steps = twin(view, replace(POLICY, rebalance=False), Trials(leaders=leaders))
            moves = {s.tablet_id: s for s in steps if isinstance(s, MoveLeader) and "load" in s.reason}
            exchanged += len(moves)
            led = (
                replace(t, leader_node=moves[t.tablet_id].target_node) if t.tablet_id in moves else t
                for t in tablets
            )
            if rng.random() < 0.8:
                view = replace(view, tablets=tuple(led))
    assert exchanged > 30


async def test_leaders_that_stay_for_minutes_are_no_work() -> None:
    """A leading master without a driver held the claim all the time, and passed twice a second, until they might move again."""
    now_ms = [0]
    pool = ChannelPool(Identity())
    executor = Executor(pool, (), holder="test", now_ms=lambda: now_ms[0])
    policy = replace(POLICY, rebalance=False)
    view = cluster_of(12)
    busy = view.tablets[0].leader_node
    loads = (
        replace(t, replicas=(replace(t.replicas[0], load=5_000 * (t.leader_node == busy)), *t.replicas[1:]))
        for t in view.tablets
    )
    nodes = tuple(replace(n, load=0) for n in view.nodes)
    assert not executor.has_work(replace(view, nodes=nodes), policy)
    view = replace(view, nodes=nodes, tablets=tuple(loads))
    assert executor.has_work(view, policy)
    for step in (MoveLeader(t.tablet_id, -1, "", NodeId(busy), False) for t in view.tablets):
        executor._leaders.note(step, None, now_ms[0])
    assert not executor.has_work(view, policy)
    now_ms[0] += CALM_MS
    assert executor.has_work(view, policy)
    await pool.close()

"""One random world with moves by hand, changes of the factor, balance, losses and late orders, from a seed.

`python -m tests.driver.moves_world 2000` runs many seeds and prints how many moves they made. The model asserts what must
never happen: a voter is removed only while the others with the rows are a majority, a move begins only while all is well.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.steps import MEMBERSHIP_STEPS, Step
from stele.driver.trials import CopyMemory
from stele.driver.view import MOVE, NodeState
from stele.model.by_hand import NOT_BY_HAND, ByHand
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, ModelTablet, Refused, node_name

BALANCED = replace(POLICY, rebalance=True)
ROUNDS_MAX = 800
EVENTS = (
    *("factor", "move", "add", "remove", "release"),
    *("die", "return", "gone", "cut", "mend", "fail", "drain", "undrain", "crash", "new node", "late", "new master"),
)  # fmt: skip


class Broken(AssertionError):
    """A promise was broken; the message has the seed."""


Plan = Callable[..., tuple[Step, ...]]
"""The planner, or one that is compared with it."""


def run(seed: int, plan: Plan = plan) -> Counter[str]:
    """Disturb a cluster, then leave it alone until it is at rest. Counts of moves, and the rounds to the end."""
    rng = random.Random(seed)
    machines = rng.randint(4, 8)
    rf = rng.choice((1, 3, 3, 5) if machines > 5 else (1, 3))
    cluster = Cluster(machines, rng.randint(1, 3), rng.randint(1, 8), rf)
    for t in cluster.tablets.values():
        t.size, t.table = rng.choice((10, 20, 80)), rng.choice((1, 2))
    late: list[Step] = []
    try:
        for _ in range(rng.randint(0, 30)):
            _happen(cluster, rng, late)
            _round(cluster, rng, late, plan)
        rounds, quiet = _settle(cluster, plan)
    except AssertionError as exc:
        story = "\n".join(cluster.history[-30:])
        raise Broken(f"seed {seed}: {exc}\n{story}") from exc
    kinds = Counter(kind for kind, *_ in cluster.moves)
    return Counter(
        moves=kinds[MOVE], by_hand=len(cluster.moves) - kinds[MOVE], at_rest=quiet, rounds=rounds, worlds=1
    )


def _round(cluster: Cluster, rng: random.Random, late: list[Step], plan: Plan) -> None:
    steps = plan(cluster.view(), BALANCED)
    tablets = [s.tablet_id for s in steps if s.tablet_id]
    assert len(set(tablets)) == len(tablets), "at most one step per tablet"
    taken = rng.randint(0, len(steps))
    for step in steps[:taken]:
        _attempt(cluster, step)
    late.extend(s for s in steps[taken : taken + 1] if isinstance(s, MEMBERSHIP_STEPS))
    cluster.advance()


def _attempt(cluster: Cluster, step: Step) -> None:
    try:
        cluster.apply(step)
    except Refused as refusal:
        cluster.history.append(f"refused {type(step).__name__}: {refusal}")


def _happen(cluster: Cluster, rng: random.Random, late: list[Step]) -> None:
    """One wanted state or fault. Faults leave every group a majority."""
    nodes = list(cluster.nodes.values())
    node, t = rng.choice(nodes), rng.choice(list(cluster.tablets.values()))
    match rng.choice(EVENTS):
        case "factor":
            t.rf = rng.choice((1, 3, 5)) if len(nodes) > 6 else rng.choice((1, 3))
        case "move" | "add" | "remove" | "release" as wish:
            t.by_hand = _wish(wish, t, node, rng)
        case "die" if cluster.may_die(node.node_id):
            node.alive = False
        case "gone" if cluster.may_die(node.node_id):
            node.alive, node.gone = False, True
        case "cut" if cluster.may_die(node.node_id):
            node.cut = True
        case "mend":
            node.cut = False
        case "return" if not node.gone:
            node.alive = True
        case "fail":
            peer = rng.choice(t.config.peers)
            if peer.replica_id in t.replicas and cluster.may_fail(t, peer.replica_id):
                t.replicas[peer.replica_id].failed = True
        case "drain" if node.state is NodeState.ACTIVE:
            node.state = NodeState.DRAINING
        case "undrain" if node.state is NodeState.DRAINING:
            node.state, node.given_up = NodeState.ACTIVE, False
        case "crash":
            cluster.epoch += 1
        case "new node":
            _add_node(cluster, node.zone)
        case "late" if late:
            _attempt(cluster, late.pop(rng.randrange(len(late))))
        case "new master":
            cluster.new_leader_rounds = 2
        case _:
            pass


def _wish(wish: str, t: ModelTablet, node: ModelNode, rng: random.Random) -> ByHand:
    hand = t.by_hand
    member = rng.choice(t.config.peers).node_id
    free = t.config.peer_on(node.node_id) is None
    match wish:
        case "move" if free:
            pinned = tuple(n for n in hand.pinned if n not in (member, node.node_id))
            return replace(hand, pinned=(*pinned, node.node_id), avoided=(member,))
        case "add" if free and hand.extra < 2:
            return replace(hand, pinned=(*hand.pinned, node.node_id), extra=hand.extra + 1)
        case "remove" if hand.extra:
            pinned = tuple(n for n in hand.pinned if n != member)
            return replace(hand, pinned=pinned, avoided=(member,), extra=hand.extra - 1)
        case "release":
            return NOT_BY_HAND
    return hand


def _add_node(cluster: Cluster, zone: str) -> None:
    number = len(cluster.nodes) + 1
    cluster.nodes[node_name(number)] = ModelNode(node_name(number), f"m{number}", zone)


def _settle(cluster: Cluster, plan: Plan) -> tuple[int, int]:
    """Repair what can be repaired, and run until nothing is left to do. Returns (rounds, moves for balance
    meanwhile)."""
    for node in list(cluster.nodes.values()):
        node.cut = False
        if node.state is NodeState.DRAINING and node.alive and not node.given_up:
            node.state = NodeState.ACTIVE
    for _ in range(5):
        _add_node(cluster, "z1")
    memory, began = CopyMemory(), len(cluster.moves)
    for number in range(ROUNDS_MAX):
        for step in plan(cluster.view(), BALANCED, memory.look(cluster.view(), number * 1_000)):
            _attempt(cluster, step)
        cluster.advance()
        if cluster.healthy() and not plan(cluster.view(), BALANCED):
            break
    else:
        raise AssertionError(f"no end; last plan {plan(cluster.view(), BALANCED)[:3]}")
    mine = [move for move in cluster.moves[began:] if move[0] == MOVE]
    never_back(mine)
    _check_wishes(cluster)
    return number, len(mine)


def never_back(moves: list[tuple[str, str, str, str]]) -> None:
    """Check that no tablet returns to a set of nodes that it had before."""
    change: dict[str, Counter[str]] = {}
    been: set[tuple[str, frozenset[tuple[str, int]]]] = {(tablet, frozenset()) for _, tablet, _, _ in moves}
    for _, tablet, source, target in moves:
        now = change.setdefault(tablet, Counter())
        now[source] -= 1
        now[target] += 1
        state = tablet, frozenset((node, n) for node, n in now.items() if n)
        assert state not in been, f"ping-pong of tablet {tablet[-2:]}: {moves}"
        been.add(state)


def _check_wishes(cluster: Cluster) -> None:
    """Check that placements by hand are in effect, where they are possible."""
    for t in cluster.tablets.values():
        members = {p.node_id for p in t.config.peers}
        able = {n for n, node in cluster.nodes.items() if node.alive and node.state is NodeState.ACTIVE}
        assert not members.intersection(set(t.by_hand.avoided) - set(t.by_hand.pinned)), "on an avoided node"
        pins = [n for n in t.by_hand.pinned if n in able]
        missing = [n for n in pins if n not in members]
        assert not missing or members <= set(pins), f"pinned nodes {missing} have no replica"


if __name__ == "__main__":
    total: Counter[str] = Counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for number in range(first, first + int(sys.argv[1])):
        total += run(number)
    print(dict(total))

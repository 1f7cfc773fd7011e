"""The simulated world: one clock, one queue of events, one random source, and an unreliable network.

    World(draw_plan(seed)).run()

Phases: faults, heal, then the group must converge and make progress. Raises SimulationFailure with the seed and the
story so far. Invariant: the same plan and code give the same run, to the last event.
"""

from __future__ import annotations

import heapq
import logging
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from stele.consensus.superblock import DataState
from stele.model.config import Configuration
from stele.model.errors import SteleError, ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from tests.sim.checks import History
from tests.sim.clients import Clients
from tests.sim.content import CONTENTS
from tests.sim.driver import Driver, sim_peer
from tests.sim.faults import Faults
from tests.sim.healer import Healer
from tests.sim.judge import check_nodes, converged, hopeless, state
from tests.sim.masters import Masters
from tests.sim.messenger import Said
from tests.sim.node import SimNode
from tests.sim.plan import Plan
from tests.sim.recovery import Recovery
from tests.sim.schedule import Schedule
from tests.sim.watch import watching

_HEAL_MS_MAX = 30_000
_EVENTS_MAX = 1_000_000
STORY_LINES = 400
_SHM = Path("/dev/shm")


class SimulationFailure(Exception):
    """Something happened that must never happen. `what`: seed, time and fact, in one line."""

    def __init__(self, story: str, what: str, world: str) -> None:
        super().__init__(f"{story}\n{what}\n{world}")
        self.story = story
        self.what = what
        self.world = world


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run."""

    seed: int
    simulated_ms: int
    events: int
    committed: int
    acknowledged: int
    retries: int
    reads: int
    terms: int
    config_changes: int
    rests: int


class World:
    """One run. It remembers the newest `story_lines` of what happened; None: all. Without `strict`,
    a promise that no disk holds, or a change that comes too early, is no failure by itself: its consequences are. `spared`: numbers
    of strikes of faults that do not happen.

    `met`: how often each kind of fault was met.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        strict: bool = True,
        story_lines: int | None = STORY_LINES,
        spared: frozenset[int] = frozenset(),
    ) -> None:
        self.plan = plan
        self.strict = strict
        self.spared = spared
        self.rng = random.Random(f"world/{plan.seed}")
        self.now = 0.0
        self.met: Counter[str] = Counter()
        self.early: dict[int, tuple[OpId, tuple[ReplicaId, ...]]] = {}
        """By timestamp: the entry of a write that was answered early, and who voted then."""
        self.directory = Path(".")
        first = Configuration(-1, tuple(sim_peer(n) for n in range(1, plan.voters + 1)))
        self.content = CONTENTS["table" if plan.table else "keyspace"]
        self.history = History(first)
        self.histories = [self.history]
        """All of them: a recovery begins another."""
        self.clients = Clients(self)
        self.driver = Driver(self)
        self.healer = Healer(self, self.driver)
        self.faults = Faults(self)
        self.masters = Masters(self) if plan.catalog else None
        self.recovery = Recovery(self)
        self.nodes: dict[int, SimNode] = {}
        self.healing = False
        self._failure: SteleError | AssertionError | None = None
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._events = 0
        self._story: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=story_lines)
        self._hint = ReplicaId(self.rng.randint(1, plan.voters)) if plan.hinted else None
        self._first = first

    # For the other parts of the world

    def at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        """Call `act(*arguments)` at the time `when`."""
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, act, arguments))

    def trace(self, text: str, *arguments: object) -> None:
        """Add a line to the story."""
        self._story.append((self.now, text, arguments))

    def judge(self, check: Callable[..., None], *arguments: Any) -> None:
        """Run a check. A finding ends the run, although production's code may catch the exception."""
        try:
            check(*arguments)
        except (SteleError, AssertionError, KeyError, IndexError) as exc:
            if self._failure is None:
                self._failure = exc if isinstance(exc, SteleError) else AssertionError(repr(exc))

    def failed(self, why: str, cause: BaseException | None = None) -> None:
        """Record something that must never happen."""
        if self._failure is None:
            self._failure = AssertionError(why)
            self._failure.__cause__ = cause

    @property
    def in_log(self) -> set[OpId]:
        """The entries in the memory of leaders' logs."""
        cores = [node.core for node in self.all_nodes() if node.leads]
        return {entry.opid for core in cores if core is not None for entry in core.log.tail()}

    def all_nodes(self) -> list[SimNode]:
        """All nodes, in order of their ids."""
        return list(self.nodes.values())

    def node_of(self, directory: Path) -> SimNode:
        """The node in whose directory a store lies."""
        return self.nodes[int(directory.relative_to(self.directory).parts[0].removeprefix("n"))]

    def latency(self) -> float:
        """How long a message takes, in milliseconds."""
        plan = self.plan
        latest = min(plan.delay_max_ms, plan.delay_min_ms + 2.0) if self.healing else plan.delay_max_ms
        return self.rng.uniform(plan.delay_min_ms, latest)

    def hint_for(self, node: SimNode) -> ReplicaId | None:
        """Which leader the masters name to a replica that starts."""
        if node.life == 1:
            return self._hint
        return self.faults.hint(node)

    def disk_faults_end(self, node: SimNode) -> None:
        """A process ended, so its disk's next process begins without the fault that ended it."""
        node.disk.sync_error = node.disk.write_error = False

    def send(self, sender: ReplicaId, to: ReplicaId, message: Said, *, quiet: bool = False) -> None:
        """Send through the network: the message may be lost, duplicated, delayed or reordered."""
        plan, rng = self.plan, self.rng
        incarnation = self.nodes[sender].superblock.tablet_incarnation
        copies = 1
        if not self.healing:
            if plan.loss and rng.random() < plan.loss:
                self.met["a message lost"] += 1
                return
            if plan.duplicate and rng.random() < plan.duplicate:
                self.met["a message doubled"] += 1
                copies = 2
        for _ in range(copies):
            delay = self.latency()
            if not self.healing and plan.slow_message and rng.random() < plan.slow_message:
                self.met["a message late"] += 1
                delay += rng.uniform(0.0, 2000.0)
            if plan.usurpers_per_s and not self.healing:
                delay += self.faults.late_by(sender, to, message)
            self.at(self.now + delay, self._deliver, sender, to, message, quiet, incarnation)

    def _deliver(
        self, sender: ReplicaId, to: ReplicaId, message: Said, quiet: bool, incarnation: int
    ) -> None:
        node = self.nodes.get(to)
        if node is not None and node.up and self.faults.lets_through(sender, to, message):
            node.deliver(sender, message, quiet, incarnation)

    # The run

    def run(self) -> Outcome:
        """Run all phases.

        Raises:
            SimulationFailure: with the seed, what was broken, and the story.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="stele-sim-", dir=_SHM if _SHM.is_dir() else None))
        try:
            with watching(self):
                self._run()
        except (SteleError, AssertionError, KeyError, IndexError, TypeError) as exc:
            what = f"seed {self.plan.seed} at {self.now:.1f} ms: {exc!r}"
            raise SimulationFailure(self.story(), what, f"plan: {self.plan}\nstate: {state(self)}") from exc
        finally:
            for node in self.all_nodes():
                node.ends()
            shutil.rmtree(self.directory)
        return Outcome(
            self.plan.seed,
            int(self.now),
            self._events,
            self.history.committed_index,
            len(self.history.acknowledged),
            self.clients.retries,
            self.clients.reads,
            len(self.history.leaders),
            self.history.config.opid_index,
            self.met["a group at rest"],
        )

    def _run(self) -> None:
        for peer in self._first.peers:
            node = self.nodes[peer.replica_id] = SimNode(self, peer.replica_id)
            node.form(OPID_NONE, self._first)
        for node in self.all_nodes():
            node.boot()
        Schedule(self).begin()
        self.recovery.begin()
        self._run_until(self.plan.fault_ms, lambda: False)
        self._heal()
        target = len(self.history.acknowledged)
        done = self._run_until(self.now + _HEAL_MS_MAX, lambda: converged(self, target))
        ensure(
            done or hopeless(self),
            f"no convergence within {_HEAL_MS_MAX} ms of healing: {state(self)}",
        )
        for history in self.histories:
            history.finish(self.in_log)
        self.clients.finish()
        if self.masters is not None:
            self.masters.finish()
        check_nodes(self)

    def _run_until(self, end: float, done: Callable[[], bool]) -> bool:
        next_check = self.now
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            self._events += 1
            ensure(
                self._events < _EVENTS_MAX,
                f"more than {_EVENTS_MAX} events: something sends messages without end",
            )
            act(*arguments)
            if self._failure is not None:
                raise self._failure
            if self.now >= next_check:
                next_check = self.now + 50.0
                if done():
                    return True
        self.now = end
        return False

    def some_up(self) -> SimNode | None:
        """Any node whose process runs."""
        up = [node for node in self.all_nodes() if node.up]
        return self.rng.choice(up) if up else None

    def asked(self) -> SimNode | None:
        """The node that a client calls: the leader, or sometimes any node."""
        return self.driver.leader() if self.rng.random() < 0.9 else self.some_up()

    # Healing

    def _heal(self) -> None:
        self.trace("all heals")
        self.healing = True
        self.faults.end()
        self.recovery.ends()
        for node in self.all_nodes():
            node.stalled_until = min(node.stalled_until, self.now)
            node.slow_disk_until = min(node.slow_disk_until, self.now)
            self.disk_faults_end(node)
            node.set_fit(True)  # where all clocks are wrong, no node assigns timestamps
            node.boot()

    # Recovery

    def go_on_from(self, survivor: SimNode) -> int:
        """From now on the tablet's history is that of this node alone. Returns how many acknowledged writes are
        given up."""
        before = self.history
        self.history = survivor.history = before.forked(survivor.twin.durable)
        self.histories.append(self.history)
        self.clients.begin_anew()
        return len(before.acknowledged) - len(self.history.acknowledged)

    # Telling

    def add_node(self, data_state: DataState = DataState.READY) -> SimNode:
        """A new node, whose volume is empty."""
        replica_id = ReplicaId(len(self.nodes) + 1)
        node = self.nodes[replica_id] = SimNode(self, replica_id)
        superblock = node.superblock.with_state(data_state)
        node.superblock = replace(superblock, tablet_incarnation=self.recovery.incarnation)
        return node

    def story(self) -> str:
        """The newest lines of the story, each with its time in milliseconds."""
        return "\n".join(f"{now:9.1f}  {text.format(*arguments)}" for now, text, arguments in self._story)


def say_less() -> None:
    """Hide the logs of nodes: the story has what matters."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_seed(plan: Plan) -> tuple[int, int, Counter[str], str]:
    """(seed, acknowledged writes, faults met, the failure or nothing), for other processes."""
    seed, world = plan.seed, World(plan, story_lines=STORY_LINES)
    try:
        return seed, world.run().acknowledged, world.met, ""
    except SimulationFailure as exc:
        return seed, 0, world.met, f"{exc.what}\n{exc.world}"

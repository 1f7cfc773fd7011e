"""The simulated world: one clock, one queue of what happens next, one source of chance, a network that misbehaves.

    World(draw_plan(seed)).run()

Phases: faults, heal, then the group must converge and make progress. Raises SimulationFailure with the seed and the
story so far. Invariant: the same plan and core give the same run, to the last event.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stele.consensus.timestamps import Timestamps
from stele.model.config import Configuration
from stele.model.errors import SteleError, ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft import RaftCore
from stele.raft.effects import Role
from stele.raft.invariants import check_group
from stele.raft.messages import Message
from stele.rpc.proto.consensus_pb2 import RestingPB
from tests.sim.checks import History
from tests.sim.clients import Clients
from tests.sim.driver import Driver, sim_peer
from tests.sim.plan import Plan, draw_plan
from tests.sim.replica import SimReplica
from tests.sim.trouble import Trouble

_HEAL_MS_MAX = 30_000
_EVENTS_MAX = 400_000
_UNLED_MS_MAX = 2_500


class SimulationFailure(Exception):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    simulated_ms: int
    events: int
    committed: int
    acknowledged: int
    reads: int
    terms: int
    config_changes: int
    rests: int


STORY_LINES = 400


class World:
    """One run. It remembers the newest `story_lines` of what happened; None: all. Without `strict` a promise that no disk
    holds, and a change that comes too early, are seen by what comes of them alone."""

    def __init__(
        self,
        plan: Plan,
        core_class: type[RaftCore] = RaftCore,
        *,
        timestamps_class: type[Timestamps] = Timestamps,
        strict: bool = True,
        story_lines: int | None = STORY_LINES,
    ) -> None:
        self.plan = plan
        self.core_class = core_class
        self.timestamps_class = timestamps_class
        self.strict = strict
        self.rng = random.Random(f"world/{plan.seed}")
        self.now = 0.0
        first = Configuration(-1, tuple(sim_peer(n) for n in range(1, plan.voters + 1)))
        self.history = History(first, timed=bool(plan.clock_off_ms))
        self.clients = Clients(self)
        self.driver = Driver(self)
        self.trouble = Trouble(self)
        self.replicas: dict[int, SimReplica] = {}
        self.retired: dict[int, bool] = {}
        self.healing = False
        self.rests = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._events = 0
        self._story: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=story_lines)
        hint = ReplicaId(self.rng.randint(1, plan.voters)) if plan.hinted else None
        for peer in first.peers:
            replica = SimReplica(self, peer.replica_id, OPID_NONE, first, witness=False)
            self.replicas[peer.replica_id] = replica
        for replica in self.all_replicas():
            replica.start(hint)

    # What others ask of the world

    def at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        """Let `act(*arguments)` happen at `when`."""
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, act, arguments))

    def trace(self, text: str, *arguments: object) -> None:
        """A line of the story."""
        self._story.append((self.now, text, arguments))

    def all_replicas(self) -> list[SimReplica]:
        """All, in order of their ids."""
        return list(self.replicas.values())

    def add_replica(self, start: OpId, config: Configuration, *, witness: bool) -> SimReplica:
        """A new replica on a node of its own, started."""
        replica_id = ReplicaId(len(self.replicas) + 1)
        replica = SimReplica(self, replica_id, start, config, witness)
        self.replicas[replica_id] = replica
        replica.start(None)
        return replica

    def forget_contexts(self, replica_id: int) -> None:
        """A replica crashed."""
        self.clients.forget(replica_id)

    def send(
        self, sender: ReplicaId, to: ReplicaId, message: Message | RestingPB, *, quiet: bool = False
    ) -> None:
        """Through the network: lost, doubled, late, out of order."""
        plan, rng = self.plan, self.rng
        copies = 1
        if not self.healing:
            if plan.loss and rng.random() < plan.loss:
                return
            if plan.duplicate and rng.random() < plan.duplicate:
                copies = 2
        for _ in range(copies):
            latest = min(plan.delay_max_ms, plan.delay_min_ms + 2.0) if self.healing else plan.delay_max_ms
            delay = rng.uniform(plan.delay_min_ms, latest)
            if not self.healing and plan.slow_message and rng.random() < plan.slow_message:
                delay += rng.uniform(0.0, 2000.0)
            self.at(self.now + delay, self._deliver, sender, to, message, quiet)

    def _deliver(self, sender: ReplicaId, to: ReplicaId, message: Message | RestingPB, quiet: bool) -> None:
        replica = self.replicas.get(to)
        if replica is not None and replica.up and self.trouble.lets_through(sender, to, message):
            replica.deliver(sender, message, quiet, replica.life)

    # The run

    def run(self) -> Outcome:
        """All phases.

        Raises:
            SimulationFailure: with the seed, what was broken, and the story.
        """
        try:
            self._arrange()
            self._run_until(self.plan.fault_ms, lambda: False)
            self._heal()
            healed_at = self.now
            target = len(self.history.acknowledged)
            done = self._run_until(self.now + _HEAL_MS_MAX, lambda: self._converged(target))
            ensure(
                done or self._hopeless(),
                f"no convergence within {_HEAL_MS_MAX} ms of healing: {self._state()}",
            )
            self.history.finish()
            self._check_all()
        except (SteleError, AssertionError, KeyError, IndexError, TypeError) as exc:
            raise SimulationFailure(self._report(exc)) from exc
        return Outcome(
            self.plan.seed,
            int(self.now - healed_at + self.plan.fault_ms),
            self._events,
            self.history.committed_index,
            len(self.history.acknowledged),
            self.history.reads,
            len(self.history.leaders),
            self.history.config.opid_index,
            self.rests,
        )

    def _run_until(self, end: float, done: Callable[[], bool]) -> bool:
        next_check = self.now
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            self._events += 1
            ensure(self._events < _EVENTS_MAX, f"more than {_EVENTS_MAX} events: something chatters")
            act(*arguments)
            if self.now >= next_check:
                next_check = self.now + 50.0
                if done():
                    return True
        self.now = end
        return False

    def _check_all(self) -> None:
        check_group([r.core for r in self.all_replicas() if r.core is not None])

    def _check_rests(self) -> None:
        """Nobody rests for long without a leader that leads."""
        for replica in self.all_replicas():
            core = replica.core
            leader = self.replicas[core.leader].core if core is not None and core.leader is not None else None
            led = core is not None and leader is not None and leader.role is Role.LEADER
            if not replica.quiet or self.now < replica.stalled_until or (led and leader.term == core.term):
                replica.unled_since = self.now
            ensure(
                self.now - replica.unled_since < _UNLED_MS_MAX,
                f"replica {replica.replica_id} has been at rest without a leader for {_UNLED_MS_MAX} ms",
            )

    def _arrange(self) -> None:
        plan = self.plan
        self._often(plan.writes_per_s, self._write)
        self._often(plan.reads_per_s, self._read)
        self._often(plan.changes_per_s, self.driver.change)
        self._often(plan.transfers_per_s, self.driver.transfer)
        self._often(plan.flushes_per_s, self._flush)
        self._often(plan.partitions_per_s, self.trouble.partition)
        self._often(plan.crashes_per_s, self.trouble.crash)
        self._often(plan.rushes_per_s, self.trouble.rush)
        self._often(plan.alarms_per_s, self.trouble.alarm)
        self._often(plan.stalls_per_s, self.trouble.stall)
        self._often(plan.slow_disks_per_s, self.trouble.slow_disk)
        self._often(plan.unfit_per_s, self.trouble.unfit)
        if plan.clock_off_ms:
            self._often(2.0, self.trouble.step_clock)
            self._often(10.0, self._snapshot)
        self._often(4.0, self._check_all)
        self._often(1.0, self.driver.tombstone_removed)
        if plan.rest_after_ms is not None:
            self._often(10.0, self._check_rests)
            self._often(plan.rest_crashes_per_s, self.trouble.crash_at_rest)
        if plan.failures:
            self.at(self.rng.uniform(500.0, plan.fault_ms), self.trouble.fail_one)

    def _often(self, per_s: float, act: Callable[[], None]) -> None:
        """Let it happen at random moments, so many times a second."""
        if per_s <= 0:
            return

        def happen() -> None:
            # When healing, clients and the masters go on; trouble and changes stop.
            if not self.healing or act in (self._write, self._read, self._flush):
                act()
            self.at(self.now + self.rng.expovariate(per_s / 1000.0), happen)

        self.at(self.now + self.rng.expovariate(per_s / 1000.0), happen)

    def some_up(self) -> SimReplica | None:
        up = [r for r in self.all_replicas() if r.up]
        return self.rng.choice(up) if up else None

    def _write(self) -> None:
        if self._lull or (self.healing and self.rng.random() < 0.8):
            return  # so that groups come to rest, and the slowest can catch up
        target = self._asked()
        if target is not None:
            self.clients.write(target.replica_id)

    def _asked(self) -> SimReplica | None:
        """Whom a client asks: who leads, and now and then anybody. A node refuses for a replica that does not lead."""
        target = self.driver.leader() if self.rng.random() < 0.9 else self.some_up()
        if target is None or self.plan.rest_after_ms is None:
            return target
        return target if target.core is not None and target.core.role is Role.LEADER else None

    @property
    def _lull(self) -> bool:
        """Whether the clients of a world whose groups rest let them."""
        return self.plan.rest_after_ms is not None and int(self.now / self.plan.lull_ms) % 2 == 1

    def _read(self) -> None:
        if self._lull:
            return
        target = self._asked()
        if target is not None:
            self.clients.read(target.replica_id)

    def _snapshot(self) -> None:
        target = self._asked()
        if target is not None:
            self.clients.snapshot(target.replica_id)

    def _flush(self) -> None:
        replica = self.some_up()
        if replica is not None and replica.core is not None and replica.has_data:
            bound = replica.core.all_replicated_index
            replica.flush(replica.applied if self.rng.random() < 0.3 else min(bound, replica.applied))

    # Healing

    def _heal(self) -> None:
        self.trace("all heals")
        self.healing = True
        self.trouble.end()
        for replica in self.all_replicas():
            replica.stalled_until = min(replica.stalled_until, self.now)
            replica.slow_disk_until = min(replica.slow_disk_until, self.now)
            if not self.plan.stays_unfit:
                replica.set_fit(True)
            self.trouble.restart(replica)

    def _converged(self, target: int) -> bool:
        """One leader, a write since healing, and every sound peer has what the leader has committed."""
        if len(self.history.acknowledged) <= target:
            return False
        leaders = [r.core for r in self.all_replicas() if r.core is not None and r.core.role is Role.LEADER]
        if len(leaders) != 1 or leaders[0].pending_change_index is not None or leaders[0].transferring:
            return False
        leader = leaders[0]
        for peer in leader.config.peers:
            replica = self.replicas[peer.replica_id]
            if replica.failed:
                continue
            core = replica.core
            if core is None or core.term != leader.term or core.leader != leader.self_replica:
                return False
            if core.log.handed_index < leader.commit_index - 40 or core.config != leader.config:
                return False
            if not core.term_committed:
                return False
        return True

    def _hopeless(self) -> bool:
        """A FAILED voter may, for good, be one too many in the configuration that is in force."""
        for replica in self.all_replicas():
            if replica.core is None:
                continue
            config = replica.core.config
            sound = [p for p in config.voters if not self.replicas[p.replica_id].failed]
            if config.voters and len(sound) < config.majority:
                return True
        return False

    # Telling

    def _state(self) -> str:
        parts = []
        for replica in self.all_replicas():
            core = replica.core
            if core is None:
                parts.append(f"{replica.replica_id} down")
            else:
                log = core.log
                parts.append(
                    f"{replica.replica_id} {core.role.value} term {core.term} leader {core.leader} commit "
                    f"{core.commit_index} log {log.start}..{log.last_opid} config {core.config.opid_index}"
                    f"[{','.join(f'{p.replica_id}{p.member_type.name[0]}' for p in core.config.peers)}]"
                    f"{' FAILED' if replica.failed else ''}{'' if replica.has_data else ' no rows'}"
                )
        return "; ".join(parts)

    def story(self) -> str:
        """The newest lines, one each, with their times in milliseconds."""
        return "\n".join(f"{now:9.1f}  {text.format(*arguments)}" for now, text, arguments in self._story)

    def _report(self, exc: BaseException) -> str:
        return f"{self.story()}\nseed {self.plan.seed} at {self.now:.1f} ms: {exc!r}\nplan: {self.plan}\nstate: {self._state()}"


def tell_seed(seed: int) -> Iterator[str]:
    """The whole story of a seed, then what came of it. Raises SimulationFailure, after the story, if it fails."""
    world = World(draw_plan(seed), story_lines=None)
    try:
        result = world.run()
    except SimulationFailure as exc:
        yield world.story()
        raise SimulationFailure(str(exc).removeprefix(world.story()).lstrip()) from None
    yield world.story()
    yield f"{world.plan}\n{result}"


def run_seed(seed: int) -> tuple[int, int, str]:
    """(seed, acknowledged writes, what failed or nothing), as other processes need it."""
    try:
        return seed, World(draw_plan(seed)).run().acknowledged, ""
    except SimulationFailure as exc:
        return seed, 0, str(exc)

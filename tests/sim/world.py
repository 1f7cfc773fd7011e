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

from stele.model.config import Configuration
from stele.model.errors import SteleError, ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft import RaftCore
from stele.raft.effects import Role
from stele.raft.events import PeerFailed
from stele.raft.invariants import check_group
from stele.raft.messages import Message
from stele.rpc.proto.consensus_pb2 import RestingPB
from tests.sim.checks import History
from tests.sim.clients import Clients
from tests.sim.driver import Driver, sim_peer
from tests.sim.plan import Plan, draw_plan
from tests.sim.replica import SimReplica

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
    """One run. It remembers the newest `story_lines` of what happened; None: all."""

    def __init__(
        self, plan: Plan, core_class: type[RaftCore] = RaftCore, *, story_lines: int | None = STORY_LINES
    ) -> None:
        self.plan = plan
        self.core_class = core_class
        self.rng = random.Random(f"world/{plan.seed}")
        self.now = 0.0
        first = Configuration(-1, tuple(sim_peer(n) for n in range(1, plan.voters + 1)))
        self.history = History(first)
        self.clients = Clients(self)
        self.driver = Driver(self)
        self.replicas: dict[int, SimReplica] = {}
        self.retired: dict[int, bool] = {}
        self.healing = False
        self.rests = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._events = 0
        self._blocked: dict[tuple[int, int], float] = {}
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
        if self._blocked.get((sender, to), 0.0) > self.now:
            return
        replica = self.replicas.get(to)
        if replica is not None and replica.up:
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
        self._often(plan.partitions_per_s, self._partition)
        self._often(plan.crashes_per_s, self._crash)
        self._often(plan.alarms_per_s, self._alarm)
        self._often(plan.stalls_per_s, self._stall)
        self._often(plan.slow_disks_per_s, self._slow_disk)
        self._often(plan.unfit_per_s, self._unfit)
        self._often(4.0, self._check_all)
        self._often(1.0, self.driver.tombstone_removed)
        if plan.rest_after_ms is not None:
            self._often(10.0, self._check_rests)
            self._often(plan.rest_crashes_per_s, self._crash_at_rest)
        if plan.failures:
            self.at(self.rng.uniform(500.0, plan.fault_ms), self._fail_one)

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

    def _some_up(self) -> SimReplica | None:
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
        target = self.driver.leader() if self.rng.random() < 0.9 else self._some_up()
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

    def _flush(self) -> None:
        replica = self._some_up()
        if replica is not None and replica.core is not None and replica.has_data:
            bound = replica.core.all_replicated_index
            replica.flush(replica.applied if self.rng.random() < 0.3 else min(bound, replica.applied))

    def _partition(self) -> None:
        """Cut some replicas off, both ways or one."""
        ids = list(self.replicas)
        self.rng.shuffle(ids)
        island = ids[: self.rng.randint(1, max(1, len(ids) // 2))]
        until = self.now + self.rng.uniform(50.0, 4000.0)
        both = self.rng.random() < 0.7
        self.trace("partition of {} until {}", island, int(until))
        for inside in island:
            for outside in ids:
                if outside not in island:
                    self._blocked[(inside, outside)] = until
                    if both:
                        self._blocked[(outside, inside)] = until

    def _crash(self) -> None:
        leader = self.driver.leader()
        replica = (
            leader if leader is not None and self.rng.random() < self.plan.crash_leader else self._some_up()
        )
        if replica is None:
            return
        group = [replica]
        if self.rng.random() < 0.1:
            group = [r for r in self.all_replicas() if r.up]  # the power fails everywhere
        for one in group:
            self._crash_one(one, one.life)

    def _crash_at_rest(self) -> None:
        leader = self.driver.leader()
        if leader is not None and leader.quiet:
            self._crash_one(leader, leader.life)

    def _crash_one(self, replica: SimReplica, life: int, down_ms_max: float | None = None) -> None:
        if self.healing or not replica.up or replica.life != life:
            return
        replica.crash()
        self.at(
            self.now + self.rng.uniform(1.0, down_ms_max or self.plan.down_ms_max), self._restart, replica
        )
        if self.rng.random() < 0.5:
            self._tell_failed(replica)

    def _tell_failed(self, replica: SimReplica) -> None:
        for other in self.all_replicas():
            if other.up and other is not replica:
                self.at(self.now + self.rng.uniform(0.1, 5.0), other.feed, PeerFailed(replica.replica_id))

    def _alarm(self) -> None:
        """The leader's node is taken for failed, rightly or not."""
        leader = self.driver.leader()
        if leader is not None:
            self._tell_failed(leader)

    def voted(self, replica: SimReplica) -> None:
        """A vote has just become durable: a good moment to lose power."""
        if self.rng.random() < self.plan.crash_after_vote:
            self.at(self.now + self.rng.uniform(0.0, 5.0), self._crash_one, replica, replica.life, 20.0)

    def elected(self, replica: SimReplica) -> None:
        """A leader has just been elected: another good moment."""
        if self.rng.random() < self.plan.crash_after_election:
            last_ms = 4.0 * self.plan.delay_max_ms + 2.0 * self.plan.sync_ms
            self.at(self.now + self.rng.uniform(0.0, last_ms), self._crash_one, replica, replica.life)

    def _restart(self, replica: SimReplica) -> None:
        if not replica.up and replica.replica_id not in self.retired:
            leader = self.driver.leader()
            hint = self.rng.choice((None, None if leader is None else leader.replica_id, replica.replica_id))
            replica.start(hint)

    def _unfit(self) -> None:
        """A node's clock is wrong; mostly somebody mends it. Sometimes it leads on, as one whose others never take over."""
        replica = self._some_up()
        if replica is None:
            return
        replica.set_fit(False)
        if self.rng.random() < 0.7:
            self.at(self.now + self.rng.uniform(100.0, 5000.0), replica.set_fit, True)

    def _stall(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.stalled_until = self.now + self.rng.uniform(20.0, 2000.0)

    def _slow_disk(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.slow_disk_until = self.now + self.rng.uniform(100.0, 3000.0)

    def _fail_one(self) -> None:
        if self.healing:
            return
        config = self.history.config
        voters = [self.replicas[p.replica_id] for p in config.voters]
        sound = [r for r in voters if r.up and r.has_data and not r.abstains]
        if len(voters) >= 3 and len(sound) == len(voters):
            victim = self.rng.choice(sound)
            self.trace("{} FAILS", victim.replica_id)
            victim.fail(for_good=not self.plan.failed_ms_max)
            if self.plan.failed_ms_max:
                later = self.now + self.rng.uniform(20.0, self.plan.failed_ms_max)
                self.at(later, self._start_again, victim, victim.life)
        if self.plan.failed_ms_max:
            self.at(self.now + self.rng.uniform(500.0, 3000.0), self._fail_one)

    def _start_again(self, replica: SimReplica, life: int) -> None:
        if replica.life == life:
            replica.crash()
            self.at(self.now + self.rng.uniform(1.0, 500.0), self._restart, replica)

    # Healing

    def _heal(self) -> None:
        self.trace("all heals")
        self.healing = True
        self._blocked.clear()
        for replica in self.all_replicas():
            replica.stalled_until = min(replica.stalled_until, self.now)
            replica.slow_disk_until = min(replica.slow_disk_until, self.now)
            if not self.plan.stays_unfit:
                replica.set_fit(True)
            self._restart(replica)

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

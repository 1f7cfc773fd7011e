"""Trouble: who is cut off, loses power, stalls, FAILs; some at random, some when it hurts most.

Drives the world's replicas and its network; judges nothing. Invariant: does only what machines, disks and networks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stele.raft.events import PeerFailed
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.proto.consensus_pb2 import RestingPB
from tests.sim.replica import SimReplica

if TYPE_CHECKING:
    from tests.sim.world import World


class Trouble:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._plan = world.plan
        self._blocked: dict[tuple[int, int], float] = {}
        self._reach: dict[int, int] = {}
        """How many more messages with entries of a leader arrive; without limit where it is not named."""
        self._takers: dict[int, int] = {}
        """Who took the last entries of each of these leaders."""

    def lets_through(self, sender: int, to: int, message: Message | RestingPB) -> bool:
        """Whether a message that is about to arrive does."""
        if self._blocked.get((sender, to), 0.0) > self._world.now:
            return False
        if isinstance(message, UpdateRequest) and message.entries and sender in self._reach:
            if self._reach[sender] == 0:
                return False
            self._reach[sender] -= 1
            self._takers[sender] = to
        return True

    def _later(self, low_ms: float, high_ms: float, act: Callable[..., None], *arguments: object) -> None:
        self._world.at(self._world.now + self._rng.uniform(low_ms, high_ms), act, *arguments)

    def end(self) -> None:
        """The network heals."""
        self._blocked.clear()
        self._reach.clear()

    def partition(self) -> None:
        """Cut some replicas off, both ways or one."""
        ids = list(self._world.replicas)
        self._rng.shuffle(ids)
        island = ids[: self._rng.randint(1, max(1, len(ids) // 2))]
        until = self._world.now + self._rng.uniform(50.0, 4000.0)
        both = self._rng.random() < 0.7
        self._cut_off(island, until, both=both)

    def _cut_off(self, island: list[int], until: float, *, both: bool) -> None:
        self._world.trace("partition of {} until {}", island, int(until))
        for inside in island:
            for outside in self._world.replicas:
                if outside not in island:
                    self._blocked[(inside, outside)] = until
                    if both:
                        self._blocked[(outside, inside)] = until

    def crash(self) -> None:
        """The power fails: of a leader, of anybody, now and then of all."""
        leader = self._world.driver.leader()
        replica = (
            leader
            if leader is not None and self._rng.random() < self._plan.crash_leader
            else self._world.some_up()
        )
        if replica is None:
            return
        group = [replica]
        if self._rng.random() < 0.1:
            group = [r for r in self._world.all_replicas() if r.up]  # the power fails everywhere
        for one in group:
            self._crash_one(one, one.life)

    def crash_at_rest(self) -> None:
        """A leader dies that nobody hears anyway."""
        leader = self._world.driver.leader()
        if leader is not None and leader.quiet:
            self._crash_one(leader, leader.life)

    def _crash_one(self, replica: SimReplica, life: int, down_ms_max: float | None = None) -> None:
        if self._world.healing or not replica.up or replica.life != life:
            return
        replica.crash()
        self._later(1.0, down_ms_max or self._plan.down_ms_max, self.restart, replica)
        if self._rng.random() < 0.5:
            self._tell_failed(replica)

    def _tell_failed(self, replica: SimReplica) -> None:
        for other in self._world.all_replicas():
            if other.up and other is not replica:
                self._later(0.1, 5.0, other.feed, PeerFailed(replica.replica_id))

    def alarm(self) -> None:
        """The leader's node is taken for failed, rightly or not."""
        leader = self._world.driver.leader()
        if leader is not None:
            self._tell_failed(leader)

    def voted(self, replica: SimReplica) -> None:
        """A vote has just become durable: a good moment to lose power."""
        if self._rng.random() < self._plan.crash_after_vote:
            down_ms = self._plan.vote_down_ms_max
            self._later(0.0, 0.25 * down_ms, self._crash_one, replica, replica.life, down_ms)

    def elected(self, replica: SimReplica) -> None:
        """A leader has just been elected: another good moment."""
        if self._plan.reaches:
            self._doom(replica)
        elif self._rng.random() < self._plan.crash_after_election:
            last_ms = 4.0 * self._plan.delay_max_ms + 2.0 * self._plan.sync_ms
            self._later(0.0, last_ms, self._crash_one, replica, replica.life)

    def _doom(self, leader: SimReplica) -> None:
        """A leader whose entries go so far and no further, and who dies then; at times with whoever took them, and at times
        while its disk or those of all others stand still (Raft figure 8, step by step)."""
        rng = self._rng
        self._reach[leader.replica_id] = rng.choice(self._plan.reaches)
        self._takers.pop(leader.replica_id, None)
        due = self._world.now + rng.uniform(0.5, 2.0) * self._plan.options.election_min_ms
        slow = rng.choice(("nobody", "leader", "others"))
        for replica in self._world.all_replicas():
            if slow == ("leader" if replica is leader else "others"):
                replica.slow_disk_until = due + 5.0 * (due - self._world.now)
        self._world.at(due, self._end_of, leader, leader.life)

    def _end_of(self, leader: SimReplica, life: int) -> None:
        world = self._world
        self._reach.pop(leader.replica_id, None)
        for replica in world.all_replicas():
            replica.slow_disk_until = min(replica.slow_disk_until, world.now)
        dead = [leader]
        taker = self._takers.get(leader.replica_id)
        if taker is not None and self._rng.random() < 0.6:
            dead.append(world.replicas[taker])
        early = self._rng.choice(dead) if len(dead) > 1 else None
        for one in dead:
            back_ms = self._plan.options.election_min_ms if one is early else None
            self._crash_one(one, life if one is leader else one.life, back_ms)

    def rush(self) -> None:
        """A leader is cut off, at times with one other, while it is asked for one change after the other."""
        leader = self._world.driver.leader()
        if leader is None or leader.core is None:
            return
        peers = [p.replica_id for p in leader.core.config.peers if p.replica_id != leader.replica_id]
        island = [leader.replica_id, *self._rng.sample(peers, min(len(peers), self._rng.choice((0, 0, 1))))]
        self._cut_off(island, self._world.now + self._rng.uniform(500.0, 3000.0), both=True)
        take_away = self._rng.random() < 0.7
        for _ in range(self._rng.choice((2, 3, 4))):
            self._later(0.0, 20.0, lambda: self._world.driver.change(leader, take_away=take_away))

    def restart(self, replica: SimReplica) -> None:
        """Power is back; the masters may name a leader."""
        if not replica.up and replica.replica_id not in self._world.retired:
            leader = self._world.driver.leader()
            hint = self._rng.choice((None, None if leader is None else leader.replica_id, replica.replica_id))
            replica.start(hint)

    def unfit(self) -> None:
        """A node's clock is wrong; mostly somebody mends it. Sometimes it leads on, as one whose others never take over."""
        replica = self._world.some_up()
        if replica is None:
            return
        replica.set_fit(False)
        if self._rng.random() < 0.7:
            self._later(100.0, 5000.0, replica.set_fit, True)

    def step_clock(self) -> None:
        """A wall clock is set, forth or back: mostly right but for some milliseconds."""
        replica = self._world.some_up()
        if replica is not None:
            off_ms = self._plan.clock_off_ms * self._rng.choice((0.01, 0.1, 1.0))
            replica.step_clock(self._rng.uniform(-off_ms, off_ms))

    def stall(self) -> None:
        """A process stands still."""
        replica = self._world.some_up()
        if replica is not None:
            replica.stalled_until = self._world.now + self._rng.uniform(20.0, 2000.0)

    def slow_disk(self) -> None:
        """A disk takes its time."""
        replica = self._world.some_up()
        if replica is not None:
            replica.slow_disk_until = self._world.now + self._rng.uniform(100.0, 3000.0)

    def fail_one(self) -> None:
        """A voter FAILs, where all are sound."""
        if self._world.healing:
            return
        config = self._world.history.config
        voters = [self._world.replicas[p.replica_id] for p in config.voters]
        sound = [r for r in voters if r.up and r.has_data and not r.abstains]
        if len(voters) >= 3 and len(sound) == len(voters):
            victim = self._rng.choice(sound)
            self._world.trace("{} FAILS", victim.replica_id)
            victim.fail(for_good=not self._plan.failed_ms_max)
            if self._plan.failed_ms_max:
                later = self._world.now + self._rng.uniform(20.0, self._plan.failed_ms_max)
                self._world.at(later, self._start_again, victim, victim.life)
        if self._plan.failed_ms_max:
            self._later(500.0, 3000.0, self.fail_one)

    def _start_again(self, replica: SimReplica, life: int) -> None:
        if replica.life == life:
            replica.crash()
            self._later(1.0, 500.0, self.restart, replica)

"""Faults: nodes that are cut off, lose power, stall or FAIL; some at random, some at the worst moment.

Drives the world's replicas and its network; judges nothing. Invariant: does only what machines, disks and
networks do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stele.model.ids import OPID_NONE, ReplicaId
from stele.raft.messages import TimeoutNow, UpdateRequest
from stele.rpc.proto.consensus_pb2 import BeatPB, ConfirmPB, FollowPB
from tests.sim.judge import have_majority, lacks_log
from tests.sim.leased import LeasedLeaders
from tests.sim.messenger import Said
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World


FREE_BYTES = 1 << 40
_BUSY_WRITES = 10
"""How many writes clients begin, beside others, while a leader is deposed unawares."""


class Faults:
    """The faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._plan = world.plan
        self._blocked: dict[tuple[int, int], float] = {}
        self._reach: dict[int, int] = {}
        """How many more messages with entries arrive from a leader; unlimited if it is not in the map."""
        self._takers: dict[int, int] = {}
        """The replicas that received the last entries of each of these leaders."""
        self._slow: dict[tuple[int, int], tuple[float, float, float]] = {}
        """Until when each of these links is bad: by how many milliseconds it is slower, and which share of messages it loses."""
        self.strikes_total = 0
        self.leases = LeasedLeaders(world, self)
        self._deaf: frozenset[int] = frozenset()
        self._mute: frozenset[int] = frozenset()
        """The replicas that receive nothing, and those whose messages are lost, until the end."""

    def strikes(self, what: str) -> bool:
        """Whether a fault that is due may strike. Each strike has its own number and random source, so that
        one can be left out while the others stay the same."""
        self.strikes_total += 1
        if self.strikes_total in self._world.spared:
            return False
        self._rng = random.Random(f"strike {self.strikes_total}/{self._plan.seed}")
        self._world.trace("trouble {}: {}", self.strikes_total, what)
        return True

    def lets_through(self, sender: int, to: int, message: Said) -> bool:
        """Whether a message that is about to arrive does arrive."""
        if self._blocked and self._blocked.get((sender, to), 0.0) > self._world.now:
            self._world.met["a message cut off"] += 1
            return False
        if to in self._deaf or sender in self._mute:
            return False
        if self._slow:
            until, _, loss = self._slow.get((sender, to), (0.0, 0.0, 0.0))
            if until > self._world.now and loss and self._world.rng.random() < loss:
                self._world.met["a message lost"] += 1
                return False
        if isinstance(message, TimeoutNow):
            self.leases.hands_over(sender)
        if isinstance(message, UpdateRequest) and message.entries and sender in self._reach:
            if self._reach[sender] == 0:
                return False
            self._reach[sender] -= 1
            self._takers[sender] = to
        return True

    def late_by(self, sender: int, to: int, message: Said) -> float:
        """By how many milliseconds a message comes later than others. Draws nothing where answers are never late."""
        until, late_ms, _ = self._slow.get((sender, to), (0.0, 0.0, 0.0))
        if until <= self._world.now:
            late_ms = 0.0
        share, rng = self._plan.late_answers, self._world.rng
        if (
            share
            and isinstance(message, BeatPB | ConfirmPB | FollowPB)
            and message.answers
            and rng.random() < share
        ):
            self._world.met["an answer about leaders late"] += 1
            late_ms += rng.uniform(0.0, self._plan.late_ms)
        return late_ms

    def _later(self, low_ms: float, high_ms: float, act: Callable[..., None], *arguments: object) -> None:
        self._world.at(self._world.now + self._rng.uniform(low_ms, high_ms), act, *arguments)

    def end(self) -> None:
        """The network heals, and disks have space. In some worlds, nodes stay dead or deaf for good."""
        self._blocked.clear()
        self._slow.clear()
        self._reach.clear()
        if self._plan.leaves and self.strikes(f"some stay {self._plan.leaves}"):
            self._leave(self._plan.leaves)
        for node in self._world.all_nodes():
            node.disk.free = FREE_BYTES
            node.disk.fail_after = None

    def lost_for_good(self, node: SimNode) -> bool:
        """Whether it stays dead, deaf or mute until the end."""
        return node.gone or node.replica_id in self._deaf or node.replica_id in self._mute

    def _leave(self, how: str) -> None:
        """Some voters stay dead, deaf, mute or cut off. All others are a majority, whichever configuration holds."""
        world = self._world
        nodes = world.all_nodes()
        lost = [node for node in nodes if node.failed or node.may_fail or lacks_log(world, node)]
        voters = [world.nodes[peer.replica_id] for peer in world.history.config.voters]
        self._rng.shuffle(voters)
        chosen: list[SimNode] = []
        for node in voters:
            if node not in lost and have_majority(world, [*lost, *chosen, node]):
                chosen.append(node)
        chosen = chosen[: self._rng.randint(1, 2)]
        if not chosen:
            return
        ids = frozenset(node.replica_id for node in chosen)
        world.trace("{} stay {}", sorted(ids), how)
        world.met[f"a minority that stays {how}"] += 1
        if how == "dead":
            for node in chosen:
                node.crash()
                node.gone = True
        else:
            self._deaf = ids if how != "mute" else frozenset()
            self._mute = ids if how != "deaf" else frozenset()

    def partition(self) -> None:
        """Cut some replicas off, in both directions or in one."""
        ids = list(self._world.nodes)
        self._rng.shuffle(ids)
        island = ids[: self._rng.randint(1, max(1, len(ids) // 2))]
        until = self._world.now + self._rng.uniform(50.0, 4000.0)
        both = self._rng.random() < 0.7
        self.cut_off(island, until, both=both)

    def block(self, sender: int, to: int, until: float) -> None:
        """Nothing of one node reaches another until then."""
        self._blocked[(sender, to)] = until

    def slow_down(self, sender: int, to: int, until: float, late_ms: float) -> None:
        """Messages from one node to another come later until then."""
        self._slow[(sender, to)] = until, late_ms, 0.0

    def cut_off(self, island: Sequence[int], until: float, *, both: bool) -> None:
        """Cut these replicas off from all others, in both directions or in the one to the others."""
        self._world.trace("partition of {} until {}", island, int(until))
        self._world.met["a partition" if both else "a one-way cut"] += 1
        for inside in island:
            for outside in self._world.nodes:
                if outside not in island:
                    self._blocked[(inside, outside)] = until
                    if both:
                        self._blocked[(outside, inside)] = until

    def crash(self) -> None:
        """The power fails: of a leader, of any node, sometimes of all."""
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
            group = [r for r in self._world.all_nodes() if r.up]  # the power fails everywhere
        for one in group:
            self._crash_one(one, one.life)

    def crash_at_rest(self) -> None:
        """A leader dies that no other replica hears anyway."""
        leader = self._world.driver.leader()
        if leader is not None and leader.resting:
            self._crash_one(leader, leader.life)

    def _crash_one(self, replica: SimNode, life: int, down_ms_max: float | None = None) -> None:
        if self._world.healing or not replica.up or replica.life != life:
            return
        if self._rng.random() < self._plan.kill:
            self._world.met["a process killed"] += 1
            replica.exits("it is killed", again=False)
        else:
            replica.crash()
        self._later(1.0, down_ms_max or self._plan.down_ms_max, self.restart, replica)
        if self._rng.random() < 0.5:
            self.tell_failed(replica)

    def tell_failed(self, replica: SimNode) -> None:
        for other in self._world.all_nodes():
            if other.up and other is not replica:
                self._later(0.1, 5.0, other.lost, replica.replica_id)

    def alarm(self) -> None:
        """The leader's node is considered failed, rightly or not."""
        leader = self._world.driver.leader()
        if leader is not None:
            self.tell_failed(leader)

    def voted(self, replica: SimNode) -> None:
        """A vote has just become durable: a good moment for a power loss."""
        if self._world.rng.random() < self._plan.crash_after_vote and self.strikes("crash after a vote"):
            down_ms = self._plan.vote_down_ms_max
            self._later(0.0, 0.25 * down_ms, self._crash_one, replica, replica.life, down_ms)

    def elected(self, replica: SimNode) -> None:
        """A leader has just been elected: a good moment for a crash."""
        if self._plan.reaches:
            if self.strikes("a doomed leader"):
                self._doom(replica)
        elif self._world.rng.random() < self._plan.crash_after_election and self.strikes(
            "crash after an election"
        ):
            last_ms = 4.0 * self._plan.delay_max_ms + 2.0 * self._plan.sync_ms
            self._later(0.0, last_ms, self._crash_one, replica, replica.life)

    def changing(self, leader: SimNode, subject: SimNode) -> None:
        """A leader got an order for a change: a good moment for its power loss, or for that of the replica to
        be changed."""
        if self._world.rng.random() < self._plan.crash_in_change and self.strikes("crash in a change"):
            victim = self._rng.choice((leader, subject))
            self._world.met["a crash in a change"] += 1
            self._later(0.0, 100.0, self._crash_one, victim, victim.life)

    def copying(self, node: SimNode, took_ms: float) -> None:
        """Rows are being copied to a node: a good moment for a crash."""
        if self._world.rng.random() < self._plan.crash_in_change and self.strikes("crash in a copy"):
            self._later(0.0, took_ms, self._crash_one, node, node.life)

    def _doom(self, leader: SimNode) -> None:
        """A leader whose entries reach only some replicas and that then dies. Sometimes the receivers die,
        too, or the disk of the leader or of all others stalls (Raft figure 8, step by step)."""
        rng = self._rng
        self._reach[leader.replica_id] = rng.choice(self._plan.reaches)
        self._takers.pop(leader.replica_id, None)
        due = self._world.now + rng.uniform(0.5, 2.0) * self._plan.options.election_min_ms
        slow = rng.choice(("nobody", "leader", "others"))
        for replica in self._world.all_nodes():
            if slow == ("leader" if replica is leader else "others"):
                replica.slow_disk_until = due + 5.0 * (due - self._world.now)
        self._world.at(due, self._end_of, leader, leader.life)

    def _end_of(self, leader: SimNode, life: int) -> None:
        world = self._world
        self._reach.pop(leader.replica_id, None)
        for replica in world.all_nodes():
            replica.slow_disk_until = min(replica.slow_disk_until, world.now)
        dead = [leader]
        taker = self._takers.get(leader.replica_id)
        if taker is not None and self._rng.random() < 0.6:
            dead.append(world.nodes[taker])
        early = self._rng.choice(dead) if len(dead) > 1 else None
        for one in dead:
            back_ms = self._plan.options.election_min_ms if one is early else None
            self._crash_one(one, life if one is leader else one.life, back_ms)

    def rush(self) -> None:
        """Cut a leader off, sometimes with one other replica, while it gets one order for a change after
        another."""
        leader = self._world.driver.leader()
        if leader is None or leader.core is None:
            return
        peers = [p.replica_id for p in leader.core.config.peers if p.replica_id != leader.replica_id]
        island = [leader.replica_id, *self._rng.sample(peers, min(len(peers), self._rng.choice((0, 0, 1))))]
        self.cut_off(island, self._world.now + self._rng.uniform(500.0, 3000.0), both=True)
        take_away = self._rng.random() < 0.7
        for _ in range(self._rng.choice((2, 3, 4))):
            self._later(0.0, 20.0, lambda: self._world.driver.change(leader, take_away=take_away))

    def usurp(self) -> None:
        """Another voter takes the lead, and nothing of it reaches the leader for a while. The link from the others to the
        leader is slow. Sometimes the leader's process has just started again, between its questions and their answers."""
        leader = self._world.driver.leader()
        if leader is not None and self._plan.options.lease_ms:
            self.leases.depose(leader, self._rng)
        elif leader is not None and self._rng.random() < self._plan.returns:
            self._start_leader_again(leader, self._rng.choice((1, 2, 3)))
        elif leader is not None:
            self._depose(leader)

    def _start_leader_again(self, leader: SimNode, times: int) -> None:
        """A leader's process ends and starts again. Soon it is promoted, so that it leads once more."""
        if self._world.healing or not leader.up:
            return
        self._world.met["a leader started again"] += 1
        leader.exits("it is killed", again=False)
        self._later(1.0, 20.0, self.restart, leader)
        low = self._plan.options.election_min_ms
        self._later(0.3 * low, low, self._lead_again, leader, times - 1)

    def _lead_again(self, node: SimNode, times: int) -> None:
        if self._world.healing or not node.up:
            return
        if not node.leads:
            self._world.driver.promote(node)
        low = self._plan.options.election_min_ms
        if times:
            self._later(0.5 * low, 1.5 * low, self._start_leader_again, node, times)
        else:
            self._later(20.0, 1.0 * low, self._depose, node)

    def _depose(self, leader: SimNode) -> None:
        world, rng, options = self._world, self._rng, self._plan.options
        core = leader.core
        if world.healing or not leader.leads or core is None:
            return
        others = [p.replica_id for p in core.config.voters if p.replica_id != leader.replica_id]
        world.met["a leader deposed unawares"] += 1
        until = world.now + rng.uniform(0.7, 1.5) * options.election_min_ms
        late_ms = rng.choice((0.0, 0.0, 0.9)) * options.heartbeat_ms
        loss = rng.choice((0.0, 0.4, 0.6))
        for other in others:
            self._slow[(other, leader.replica_id)] = until, late_ms, loss
        both, promoted = rng.random() < 0.5, rng.random() < 0.7
        self._later(0.0, 1.5 * late_ms, self._cut_and_promote, leader, others, until, both, promoted)

    def _cut_and_promote(
        self, leader: SimNode, others: list[ReplicaId], until: float, both: bool, promoted: bool
    ) -> None:
        """Nothing of the most advanced of the others reaches the leader, and it stands for election."""
        world, options = self._world, self._plan.options
        heirs = [node for replica_id in others if (node := world.nodes[replica_id]).core is not None]
        if world.healing or not heirs:
            return
        self._rng.shuffle(heirs)
        heir = max(heirs, key=lambda node: node.core.log.last_opid if node.core is not None else OPID_NONE)
        self._blocked[(heir.replica_id, leader.replica_id)] = until
        if both:
            self._blocked[(leader.replica_id, heir.replica_id)] = until
        if promoted:
            world.driver.promote(heir)
        else:
            self.tell_failed(leader)
        for _ in range(_BUSY_WRITES):
            self._later(2.0, 3.0 * options.heartbeat_ms, world.clients.write, heir)

    def restart(self, replica: SimNode) -> None:
        """The power is back."""
        replica.boot()

    def hint(self, replica: SimNode) -> ReplicaId | None:
        """Which leader the masters name to a replica that starts again: none, the present one, or itself."""
        leader = self._world.driver.leader()
        rng = self._world.rng  # a start is not a strike
        return rng.choice((None, None if leader is None else leader.replica_id, replica.replica_id))

    # Disks

    def disk_error(self) -> None:
        """The next write or sync of a disk fails; the node ends, and starts again on the same files."""
        node = self._world.some_up()
        if node is not None:
            what = self._rng.choice(("sync", "write"))
            self._world.trace("the next {} of {} fails", what, node.replica_id)
            self._world.met[f"EIO of a {what}"] += 1
            setattr(node.disk, f"{what}_error", True)

    def full_disk(self) -> None:
        """A disk has little space left, or none, for a while."""
        node = self._world.some_up()
        if node is not None:
            disk = node.disk
            disk.free = self._rng.choice((0, 2_000, 40_000))
            self._world.trace("{} bytes are left on the disk of {}", disk.free, node.replica_id)
            self._world.met["a full disk"] += 1
            self._later(100.0, 4000.0, setattr, disk, "free", FREE_BYTES)

    def cut_power(self) -> None:
        """The power fails in the middle of the disk's next operation."""
        node = self._world.some_up()
        if node is not None:
            node.disk.fail_after = self._rng.randrange(12)

    def rot(self) -> None:
        """Synced bytes change on a disk, or cannot be read. At most one voter may lose its log this way."""
        config = self._world.history.config
        voters = [self._world.nodes[p.replica_id] for p in config.voters]
        sound = [n for n in voters if n.up and n.has_data and not n.may_fail]
        if len(voters) < 3 or len(sound) < len(voters):
            return
        node = self._rng.choice(sound)
        if node.thread is None:
            return
        what = node.disk.rot(self._rng, node.thread.marks[0], unreadable=self._rng.random() < 0.3)
        if what:
            node.may_fail = what
            self._world.trace("on the disk of {} {}", node.replica_id, what)
            self._world.met["rot"] += 1
            self._later(1.0, 1000.0, self._crash_one, node, node.life)

    def unfit(self) -> None:
        """A node's clock is wrong. Mostly it is corrected; sometimes the node keeps leading, because the
        others never take over."""
        replica = self._world.some_up()
        if replica is None:
            return
        replica.set_fit(False)
        if self._rng.random() < 0.7:
            self._later(100.0, 5000.0, replica.set_fit, True)

    def step_clock(self) -> None:
        """A wall clock is set forward or back: mostly it is right within some milliseconds."""
        replica = self._world.some_up()
        if replica is not None:
            self._world.met["a clock set"] += 1
            off_ms = self._plan.clock_off_ms * self._rng.choice((0.01, 0.1, 1.0))
            off_ms = self._rng.uniform(-off_ms, off_ms)
            self._world.trace("the clock of {} is off by {} ms", replica.replica_id, int(off_ms))
            replica.clocks.set_wall(off_ms)

    def stall(self) -> None:
        """A process stalls."""
        replica = self._world.some_up()
        if replica is not None:
            self._world.met["a pause"] += 1
            replica.stalled_until = self._world.now + self._rng.uniform(20.0, 2000.0)

    def slow_disk(self) -> None:
        """A disk is slow."""
        replica = self._world.some_up()
        if replica is not None:
            self._world.met["a slow disk"] += 1
            replica.slow_disk_until = self._world.now + self._rng.uniform(100.0, 3000.0)

    def fail_one(self) -> None:
        """A voter becomes FAILED while all are sound."""
        if self._world.healing:
            return
        config = self._world.history.config
        voters = [self._world.nodes[p.replica_id] for p in config.voters]
        sound = [r for r in voters if r.up and r.has_data and not r.may_fail]
        if len(voters) >= 3 and len(sound) == len(voters) and self.strikes("a replica FAILS"):
            victim = self._rng.choice(sound)
            self._world.trace("{} FAILS", victim.replica_id)
            self._world.met["a replica FAILED"] += 1
            victim.breaks("its log is damaged" if not self._plan.failed_ms_max else "it lacks memory")
            if self._plan.failed_ms_max:
                later = self._world.now + self._rng.uniform(20.0, self._plan.failed_ms_max)
                self._world.at(later, self._start_again, victim, victim.life)
        if self._plan.failed_ms_max:
            self._later(500.0, 3000.0, self.fail_one)

    def _start_again(self, replica: SimNode, life: int) -> None:
        if replica.life == life:
            replica.exits("it is started again", again=False)
            replica.may_fail = "its log was let go" if replica.let_go else ""
            self._later(1.0, 500.0, self.restart, replica)

"""Clients: they write, retry with the same client id and sequence, read, and remember the answers.

They call nodes as clients call tservers. Invariant: an operation ends once; without an answer its outcome
stays unknown.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stele.model import writeop
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Rejected, Retryable, SteleError, ensure
from stele.model.writeop import WriteHeader
from tests.linear.checker import Undecided, by_key, contradiction
from tests.linear.history import NEVER, Kind, Operation, State, Told
from tests.sim.checks import History
from tests.sim.content import Rows

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

_CLIENTS = 3
_KEYS = 4
_GIVES_UP_MS = 4_000.0
_OLD_MS = (0.0, 50.0, 400.0)
"""How old rows of followers may be."""
_OLDEST_MS = 1_500.0
"""How far back snapshots are asked for at most."""


@dataclass(slots=True, eq=False)
class _Write:
    client: int
    sequence: int
    key: str
    kind: Kind
    value: State
    begun: float
    body: bytes = b""
    header: WriteHeader | None = None
    attempt: int = 0
    over: bool = False
    early: bool = False
    timestamp: int = 0


class Clients:
    """All clients of the group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._era = 0
        """How often the tablet was recovered. What one history told is judged by itself, so others begin with new rows
        then."""
        self._told_before: list[Operation] = []
        self._told_early: dict[int, Operation] = {}
        """By timestamp: the writes that were acknowledged in memory."""
        self._next = [0] * _CLIENTS
        self._outstanding: list[dict[int, _Write]] = [{} for _ in range(_CLIENTS)]
        self.operations: list[Operation] = []
        self.reads = 0
        self.retries = 0

    def begin_anew(self) -> None:
        """The tablet was recovered: nobody answers what is under way, and new clients write other rows."""
        for waiting in self._outstanding:
            for write in list(waiting.values()):
                self._over(write, Told.UNKNOWN)
        self._told_before += self._operations(self._world.histories[-2])
        self._told_early = {}
        self.operations, self._next = [], [0] * _CLIENTS
        self._era += 1

    def _key(self, number: int) -> str:
        return f"k{number}" if not self._era else f"era{self._era}.k{number}"

    # Writes

    def write(self, node: SimNode | None = None) -> None:
        """One of the clients writes, unless it has enough writes without an answer. `node`: whom it takes for the leader."""
        rng = self._world.rng
        client = rng.randrange(_CLIENTS)
        waiting = self._outstanding[client]
        if len(waiting) >= self._world.plan.outstanding_max:
            return
        self._next[client] += 1
        sequence = self._next[client]
        content, share = self._world.content, self._world.plan.early
        early = share > 0 and rng.random() < share
        # Only whole rows can be answered early.
        kind = Kind.PUT if early and rng.random() < 0.8 else rng.choice(content.kinds)
        value = None if kind in (Kind.DELETE, Kind.DELETE_IGNORE) else content.value(client, sequence)
        key = self._key(rng.randrange(_KEYS))
        write = _Write(client, sequence, key, kind, value, self._world.now)
        write.early = early
        waiting[sequence] = write
        write.body = body = content.body(kind, key, value)
        write.header = WriteHeader(
            bytes([client + 1 + _CLIENTS * self._era]) * 16,
            sequence,
            min(waiting),
            1_700_000_000_000_000,
            writeop.digest(body),
            kind=content.body_kind,
        )
        self._attempt(write, node)

    def _attempt(self, write: _Write, known: SimNode | None = None) -> None:
        world = self._world
        if write.over:
            return
        if world.now - write.begun > _GIVES_UP_MS:
            self._over(write, Told.UNKNOWN)
            return
        write.attempt += 1
        if write.attempt > 1:
            self.retries += 1
        for _ in range(2 if world.plan.duplicate and world.rng.random() < world.plan.duplicate else 1):
            node = known or world.asked()
            if node is not None:
                world.at(world.now + world.latency(), self._arrives, write, write.attempt, node, node.life)
        world.at(world.now + world.plan.timeout_ms, self._timeout, write, write.attempt)

    def _arrives(self, write: _Write, attempt: int, node: SimNode, life: int) -> None:
        if node.life == life and not write.over:
            node.run(_serve_write(node, write), lambda task: self._answered(write, attempt, node, task))

    def _answered(self, write: _Write, attempt: int, node: SimNode, task: asyncio.Task[Any]) -> None:
        world = self._world
        if task.cancelled() or world.recovery.outdated(node):
            return
        error = task.exception()
        outcome = None if error is not None else task.result()
        if outcome is not None and outcome.in_memory:
            world.met["a write acknowledged in memory"] += 1
        world.at(world.now + world.latency(), self._told, write, attempt, outcome, error)

    def _told(self, write: _Write, attempt: int, outcome: Any, error: BaseException | None) -> None:
        world = self._world
        if write.over:
            return
        if error is None:
            error = world.content.refusal(outcome)
        if error is None:
            if outcome.in_memory:
                write.timestamp = outcome.timestamp
                opid, voters = world.early[outcome.timestamp]
                world.history.acknowledge_early(outcome.timestamp, opid, voters)
            else:
                world.history.acknowledge(outcome.timestamp)
            self._over(write, Told.DONE)
            if world.plan.reads_back and world.rng.random() < world.plan.reads_back:
                for node in world.driver.leaders():
                    self.read(write.key, node)
        elif not isinstance(error, SteleError):
            self._world.failed(f"a write ended with {error!r}", error)
        elif error.code is Code.ALREADY_PRESENT:
            self._over(write, Told.PRESENT)
        elif error.code is Code.NOT_FOUND:
            self._over(write, Told.ABSENT)
        elif error.code is Code.TOO_OLD:
            self._over(write, Told.UNKNOWN)
        elif isinstance(error, Retryable) and attempt == write.attempt:
            again = self._world.now + self._world.rng.uniform(5.0, 60.0)
            self._world.at(again, self._timeout, write, attempt)

    def _timeout(self, write: _Write, attempt: int) -> None:
        if attempt == write.attempt:
            self._attempt(write)

    def _over(self, write: _Write, told: Told) -> None:
        write.over = True
        del self._outstanding[write.client][write.sequence]
        self._remember(write, told)

    def _remember(self, write: _Write, told: Told) -> None:
        ended = NEVER if told is Told.UNKNOWN else self._world.now
        operation = Operation(
            write.key, write.kind, write.value, write.begun, ended, told, f"c{write.client}"
        )
        self.operations.append(operation)
        if write.timestamp and told is Told.DONE:
            self._told_early[write.timestamp] = operation

    # Reads

    def read(self, key: str = "", node: SimNode | None = None) -> None:
        """Read this row, or any, linearizably. `node`: whom the client takes for the leader."""
        world = self._world
        node = node or world.asked()
        if node is not None:
            key = key or self._key(world.rng.randrange(_KEYS))
            at = world.now + world.latency()
            world.at(at, self._read_arrives, key, world.now, node, node.life, self._era)

    def _read_arrives(self, key: str, begun: float, node: SimNode, life: int, era: int) -> None:
        def answered(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or isinstance(task.exception(), SteleError):
                return
            if self._world.recovery.outdated(node) or era != self._era:
                return
            self._world.at(
                self._world.now + self._world.latency(), self._read_told, key, begun, task.result()
            )

        if node.life == life:
            node.run(_serve_read(node, key), answered)

    def _read_told(self, key: str, begun: float, value: State) -> None:
        self.reads += 1
        self.operations.append(Operation(key, Kind.READ, value, begun, self._world.now, Told.DONE, "reader"))

    def read_old(self) -> None:
        """Read any row at any replica. What was acknowledged so long before must be in the answer."""
        world = self._world
        node, key = world.rng.choice(world.all_nodes()), self._key(world.rng.randrange(_KEYS))
        old_ms = world.rng.choice(_OLD_MS)
        # By the node's clock, which may be slow. What it takes for so long may be longer.
        since = max(0.0, world.now - old_ms / (1.0 - world.plan.clock_skew))
        at = world.now + world.latency()
        world.at(at, self._old_read_arrives, key, since, old_ms, node, node.life, self._era)

    def _old_read_arrives(
        self, key: str, since: float, old_ms: float, node: SimNode, life: int, era: int
    ) -> None:
        def answered(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or isinstance(task.exception(), SteleError):
                return
            if self._world.recovery.outdated(node) or era != self._era:
                return
            value, follows = task.result()
            self._world.met["a read at a follower"] += follows
            now, late = self._world.now, self._world.latency()
            self._world.at(now + late, self._read_told, key, since, value)

        if node.life == life:
            node.run(_serve_old_read(node, key, old_ms), answered)

    def snapshot(self) -> None:
        """Read at a snapshot a moment ago, now or soon, by another node's clock; of a table also at one that lies well
        within its history, so that flushes and merges have passed since."""
        world = self._world
        node, by = world.asked(), world.rng.choice(world.all_nodes())
        if node is not None:
            within_us = int(1_000 * min(world.plan.history_ms / 2, _OLDEST_MS)) if world.plan.table else 0
            wall_us = by.clocks.wall_us() + world.rng.choice((-50_000, 0, -within_us, 200_000))
            node.run(
                _serve_snapshot(node, from_physical_us(wall_us)), lambda task: self._snapshot_told(node, task)
            )

    def _snapshot_told(self, node: SimNode, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._world.judge(node.history.snapshot_served, *task.result())

    # The end

    def _operations(self, history: History) -> list[Operation]:
        """What clients were told. What was acknowledged in memory and is gone may have been done or not, and nobody has seen it."""
        gone = [self._told_early[t] for t in history.vanished(self._world.in_log) if t in self._told_early]
        self._world.met["a write in memory that a majority lost"] += len(gone)
        unknown = [replace(each, ended=NEVER, told=Told.UNKNOWN) for each in gone]
        return [each for each in self.operations if each not in gone] + unknown

    def finish(self) -> None:
        """Check that some single order of all operations explains what every client heard.

        Raises:
            InvariantViolation: it does not.
        """
        for waiting in self._outstanding:
            for write in waiting.values():
                self._remember(write, Told.UNKNOWN)
        for key, operations in by_key([*self._told_before, *self._operations(self._world.history)]).items():
            try:
                found = contradiction(operations)
            except Undecided:
                self._world.met["the history is too complex to judge"] += 1
                continue
            ensure(
                found is None,
                f"row {key} is not linearizable: nothing explains {found.culprit if found else None}; it "
                f"could be "
                f"{found.states if found else None}",
            )


async def _serve_write(node: SimNode, write: _Write) -> Any:
    replica = node.replica
    if replica is None or replica.machine is None:
        raise Retryable("no rows here")
    replica.check_leader()
    assert write.header is not None
    payload = node.world.content.payload(replica.machine, write.header, write.body)
    header, _ = writeop.decode(payload)
    replica.machine.admit(header, node.clocks.wall_us(), replica.options.clock_error_max_ms * 1000)
    if not write.early:
        return await replica.writes.propose(payload, 1_000)
    early = asyncio.get_running_loop().create_future()
    replica.writes.submit(payload, rows_only=True, early=early)
    return await replica.writes.outcome(early, 1_000)


async def _serve_read(node: SimNode, key: str) -> State:
    if node.replica is None:
        raise Retryable("no rows here")
    return await node.world.content.read(node.replica, key)


async def _serve_old_read(node: SimNode, key: str, old_ms: float) -> tuple[State, bool]:
    replica = node.replica
    if replica is None or replica.machine is None:
        raise Retryable("no rows here")
    if replica.is_leader:
        return await node.world.content.read(replica, key), False
    await replica.following.fresh(node.host.steady_us() - int(1_000 * old_ms), at_once=False)
    return node.world.content.here(replica, key), True


async def _serve_snapshot(node: SimNode, snapshot: int) -> tuple[int, int, Rows | None]:
    replica = node.replica
    if replica is None:
        raise Rejected("no rows here")
    ask = replica.following.holds if node.world.plan.old_reads_per_s else None
    await replica.reads.snapshot_ready(snapshot, ask=ask)
    if replica.machine is None:
        raise Rejected("no rows here")
    return snapshot, replica.applied_index, node.world.content.at(replica.machine, snapshot)

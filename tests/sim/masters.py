"""The masters of a world whose key space is a catalog. Each node of the group runs production's `Master` and `MasterService`.

Simulated are those around them: nodes that send heartbeats and carry orders out, drivers, and clients that create, drop,
recall and look up tables. All of them call through the world's network.

What must never happen: a name that stands for two tables, an answer that no order of the requests explains, an order
of a driver after another's claim, a replica id that is given twice, memory that differs from the key space.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from stele.master import background, dropping, following, tables
from stele.master.catalog import GONE_TABLES, Catalog
from stele.master.leadership import MasterOptions
from stele.master.master import Master
from stele.master.records import CLAIM_KEY, INTENT_PREFIX, ClaimRecord, IntentRecord
from stele.master.replica_log import ReplicaCatalogLog
from stele.master.row_encoding import decode
from stele.master.service import MasterService
from stele.model.errors import Code, Rejected, Retryable, SteleError, ensure
from stele.model.ids import OpId
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import PeerBook
from stele.rpc.proto import master_pb2 as pb
from stele.tablet.keyspace import KeySpace
from tests.linear.checker import Undecided, by_key, contradiction
from tests.linear.history import NEVER, Kind, NotDone, Operation, State, Surprise, Told, told_by
from tests.master.harness import CLUSTER, Call, create_request, no_formation
from tests.sim.claims import Driver, Given
from tests.sim.servers import Pool, Server

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

OPTIONS = MasterOptions(
    heartbeat_interval_ms=100,
    alive_ms=600,
    create_timeout_ms=2_000,
    order_retry_ms=200,
    missing_after_ms=500,
    sweep_ms=100,
    forget_after_ms=2_000,
    drive_after_ms=0,
)
_NAMES = ("red", "green")
_TABLES_MAX = 40
"""How many tables a world makes at most: rows of dropped ones stay."""
_HURRIES = 0.2
"""The share of callers that wait hardly longer than a batch takes."""
_WAIT_MS = 200
"""How long a change waits for the nodes to know it."""
_SERVERS = 4
_ROWS_AT_ONCE = 1
"""A memory reads so few rows at once that others are applied meanwhile."""

Answered = Callable[[Any, SteleError | None], None]
"""Gets the answer, or the error. UNKNOWN_OUTCOME if nothing was heard."""


_DID = {
    "DropTable": (Kind.DELETE_IGNORE,),
    "DeleteTable": (Kind.DELETE_IGNORE,),
    "RecallTable": (Kind.INSERT_IGNORE, Kind.READ),
}
"""What a request did that was told to be done. Of two that remove a table at once, both are. So is a recall of a table that is
in service."""


class Masters:
    """All masters, and who calls them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._lives: dict[int, tuple[int, Master, MasterService]] = {}
        """By node: its life, and what runs in it."""
        self.servers = {server.node_id: server for server in (Server(n) for n in range(1, _SERVERS + 1))}
        self.operations: list[Operation] = []
        self._waiting: dict[Operation, None] = {}
        """What clients asked for, and have no answer to yet."""
        self._made: list[int] = []
        """Tables that were asked for. A number is its id."""
        self._beats = 0
        self.drivers = [Driver(self, holder) for holder in ("driver A", "driver B")]
        self.given: list[Given] = []
        self._replica_ids: dict[tuple[str, int], None] = {}
        self._watched: dict[int, KeySpace] = {}

    # The masters

    def boots(self, node: SimNode) -> None:
        """A node's process has started, and its master with it."""
        pool: Any = Pool(self, node)
        log = ReplicaCatalogLog(lambda: node.replica)
        master = Master(
            node.node_id,
            CLUSTER,
            log,
            pool,
            OPTIONS,
            now_ms=lambda: int(node.clocks.monotonic_ms()),
            wall=node.clocks.wall_us,
            on_failure=lambda error: self.world.failed(
                f"the master of {node.replica_id} fails: {error!r}", error
            ),
        )
        self._lives[node.replica_id] = (node.life, master, MasterService(master, no_formation, PeerBook()))

        def start() -> None:
            log.watch()
            master.start()

        node.soon(start)

    def of(self, node: SimNode) -> tuple[Master, MasterService] | None:
        """What runs on a node; None if it is down."""
        life, master, service = self._lives.get(node.replica_id, (-1, None, None))
        return (master, service) if master is not None and service is not None and life == node.life else None

    # Calls

    def call(
        self, method: str, request: Any, answered: Answered, *, node: SimNode | None = None, caller: str = ""
    ) -> None:
        """Call a master as gRPC does: at the deadline the caller has no answer, and the handler is cancelled."""
        world = self.world
        node = node or world.asked()
        if node is None:
            answered(None, Retryable("no master runs"))
            return
        waiting = _Waiting(world, answered)
        target, life = node, node.life
        call = Call(caller, 1 if caller else 0)

        def arrives() -> None:
            there = self.of(target)
            if target.life == life and there is not None and not waiting.over and not self.lost():
                handler = getattr(there[1], method)
                target.run(_begun(handler, request, call, waiting), waiting.ended)

        hurries = world.rng.random() < _HURRIES
        deadline = world.rng.uniform(1.0, 5.0) * world.plan.delay_max_ms if hurries else world.plan.timeout_ms
        world.at(world.now + world.latency(), arrives)
        world.at(world.now + deadline, waiting.times_out)

    def lost(self) -> bool:
        plan, rng = self.world.plan, self.world.rng
        return bool(not self.world.healing and plan.loss and rng.random() < plan.loss)

    # Nodes

    def beat(self) -> None:
        """A node of the cluster sends a heartbeat to each master, and registers if the leader does not know it."""
        server = self.world.rng.choice(list(self.servers.values()))
        self._beats += 1
        for node in self.world.all_nodes():
            if node.up:
                self._beat(server, node)

    def _beat(self, server: Server, node: SimNode) -> None:
        def answered(answer: Any, error: SteleError | None) -> None:
            if error is None:
                server.told(answer)
            elif error.code is Code.NOT_FOUND:
                request = pb.RegisterNodeRequest(node_id=id_to_pb(server.node_id))
                self.call("RegisterNode", request, _ignored, caller=server.node_id)

        request = server.heartbeat(self._beats)
        self.call("TSHeartbeat", request, answered, node=node, caller=server.node_id)

    # Tables

    def table(self) -> None:
        """A client creates, drops, deletes, recalls or looks up a table; sometimes several do at once."""
        rng = self.world.rng
        name = rng.choice(_NAMES)
        for _ in range(rng.choice((1, 1, 1, 5))):
            act = rng.choice(
                (self._create, self._create, self._drop, self._delete, self._recall, self._look_up)
            )
            act(name)

    def _create(self, name: str) -> None:
        if len(self._made) >= _TABLES_MAX:
            return self._look_up(name)
        number = len(self._made) + 1
        self._made.append(number)
        request = create_request(name, table_id=f"{number:032x}")
        self._operation("CreateTable", request, name, Kind.INSERT, (number, 0))

    def _drop(self, name: str) -> None:
        drop_id = self.world.rng.randbytes(16)
        request = pb.DropTableRequest(name=name, drop_id=drop_id, wait_ms=_WAIT_MS)
        self._operation("DropTable", request, name, Kind.DELETE, None)

    def _delete(self, name: str) -> None:
        self._operation(
            "DeleteTable", pb.DeleteTableRequest(name=name, wait_ms=_WAIT_MS), name, Kind.DELETE, None
        )

    def _recall(self, name: str) -> None:
        if not self._made:
            return
        number = self.world.rng.choice(self._made)
        request = pb.RecallTableRequest(
            table_id=id_to_pb(f"{number:032x}"),
            new_name=name,
            recall_id=self.world.rng.randbytes(16),
            wait_ms=_WAIT_MS,
        )
        self._operation("RecallTable", request, name, Kind.INSERT, (number, 0))

    def _look_up(self, name: str) -> None:
        self._operation("GetTable", pb.GetTableRequest(name=name), name, Kind.READ, None)

    def _operation(self, method: str, request: Any, name: str, kind: Kind, value: State) -> None:
        begun = self.world.now
        waits = Operation(name, kind, value, begun)
        self._waiting[waits] = None

        def answered(answer: Any, error: SteleError | None) -> None:
            del self._waiting[waits]
            told, found = Told.DONE, value
            if method == "GetTable":
                if error is not None and error.code is not Code.NOT_FOUND:
                    return
                found = None if error is not None else (int(id_from_pb(answer.table.table_id), 16), 0)
            elif error is not None:
                if method == "RecallTable" and error.code in (Code.NOT_FOUND, Code.CAS_FAILED):
                    return  # about the table, not about the name
                try:
                    told = told_by(error, kind)
                except (NotDone, Surprise):
                    if not isinstance(error, Rejected | Retryable):
                        self.world.failed(f"{method} ended with {error!r}", error)
                    return
            ended = NEVER if told is Told.UNKNOWN else self.world.now
            for did in _DID.get(method, (kind,)) if told is Told.DONE else (kind,):
                self.operations.append(Operation(name, did, found, begun, ended, told, "client"))

        self.call(method, request, answered)

    # What must hold

    def watch(self, node: SimNode) -> None:
        """Watch the key space of a node, which may be another one than before."""
        machine = node.machine
        if isinstance(machine, KeySpace) and self._watched.get(node.replica_id) is not machine:
            self._watched[node.replica_id] = machine
            machine.add_commit_listener(lambda key, old, new, opid: self._committed(machine, key, new, opid))

    def _committed(self, machine: KeySpace, key: bytes, new: bytes | None, opid: OpId) -> None:
        """An order of a driver takes effect only under the claim in force at its place in the log."""
        if key.startswith(INTENT_PREFIX) and new is not None:
            self.world.met["an intent written"] += 1
            self.world.judge(_check_intent, machine.read(CLAIM_KEY), new, opid)

    def look(self) -> None:
        """Check the memory and the rows of each master."""
        for node in self.world.all_nodes():
            self.watch(node)
            there = self.of(node)
            if there is None or not isinstance(node.machine, KeySpace):
                continue
            try:
                memory = there[0].catalog
            except SteleError:
                continue  # it still reads
            self.world.judge(_check_memory, node, memory)
            self.world.met["a master's memory compared"] += 1

    def claimed(self, given: Given) -> None:
        """A driver was told that it holds the claim."""
        self.world.met["a driver's claim"] += 1
        for other in self.given:
            if other.epoch == given.epoch:
                ensure(other.holder == given.holder, f"{given} and {other} have one epoch")
            ensure(
                other.ended >= given.begun or other.epoch <= given.epoch,
                f"{given} is below {other}, which came before it",
            )
        self.given.append(given)

    def ordered(self, epoch: int, begun: float, what: str) -> None:
        """A driver was told that its order took effect."""
        newer = [other for other in self.given if other.epoch > epoch and other.ended < begun]
        ensure(not newer, f"{what} of epoch {epoch} took effect after {newer[-1] if newer else None}")

    def new_id(self, key: tuple[str, int]) -> None:
        """A driver was given an id for a new replica. `key`: the tablet, the id."""
        ensure(key not in self._replica_ids, f"replica id {key[1]} of tablet {key[0][:8]} was given twice")
        self._replica_ids[key] = None

    def content(self) -> bool:
        """Whether a master leads that has heard of nodes, and drivers work."""
        for node in self.world.all_nodes():
            there = self.of(node)
            lead = there[0].lead if there is not None else None
            if lead is not None and not lead.ended and lead.settled and lead.catalog.claim.epoch:
                return True
        return False

    def finish(self) -> None:
        """Check that some single order of all requests about a name explains what every client heard."""
        self.look()
        self.operations += [o for o in self._waiting if o.kind is not Kind.READ]
        for name, operations in by_key(self.operations).items():
            try:
                found = contradiction(operations)
            except Undecided:
                self.world.met["the history is too complex to judge"] += 1
                continue
            ensure(
                found is None,
                f"name {name!r} is not linearizable: nothing explains {found.culprit if found else None}; it "
                f"could be {found.states if found else None}",
            )


class _Waiting:
    """A caller that waits for its answer until its deadline."""

    def __init__(self, world: World, answered: Answered) -> None:
        self.over = False
        self.task: asyncio.Task[Any] | None = None
        self._world = world
        self._answered = answered

    def ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, SteleError):
            self._world.failed(f"a call to a master ended with {error!r}", error)
            return
        world, answer = self._world, None if error is not None else task.result()
        world.at(world.now + world.latency(), self._tell, answer, error)

    def times_out(self) -> None:
        if not self.over:
            if self.task is not None:
                self.task.cancel()
            self._tell(None, Retryable("no answer", code=Code.UNKNOWN_OUTCOME))

    def _tell(self, answer: Any, error: SteleError | None) -> None:
        if not self.over:
            self.over = True
            self._answered(answer, error)


async def _begun(handler: Callable[..., Awaitable[Any]], request: Any, call: Call, waiting: _Waiting) -> Any:
    waiting.task = asyncio.current_task()
    return await handler(request, call)


def _ignored(answer: Any, error: SteleError | None) -> None:
    return None


def _check_intent(claim: bytes | None, new: bytes, opid: OpId) -> None:
    intent = decode(IntentRecord, new)
    in_force = decode(ClaimRecord, claim).epoch if claim is not None else 0
    ensure(
        intent.epoch == in_force,
        f"{opid} writes an intent of epoch {intent.epoch}, and epoch {in_force} is in force",
    )


def _check_memory(node: SimNode, memory: Catalog) -> None:
    """The memory is what the rows of the key space give, and no name stands for two tables."""
    assert isinstance(node.machine, KeySpace)
    rows = Catalog(node.machine.list(), node.machine.applied)
    for what in (
        "tables",
        "table_by_name",
        "dropped",
        "tablets",
        "current",
        "gone",
        "nodes",
        "intents",
        "claim",
    ):
        ours, theirs = getattr(memory, what), getattr(rows, what)
        ensure(ours == theirs, f"the memory of {node.replica_id} differs from its rows: {what}")
    live = [t.name for t in rows.tables.values() if t.state not in GONE_TABLES]
    ensure(len(live) == len(set(live)), f"a name stands for two tables: {live}")
    for intent in rows.intents.values():
        tablet = rows.tablets[intent.tablet_id]
        ensure(
            intent.replica_id < tablet.next_replica_id,
            f"replica id {intent.replica_id} of {tablet.tablet_id} may be given again",
        )


@contextmanager
def same_ids(world: World) -> Iterator[None]:
    """Within this context, ids that masters make up come from the seed."""
    rng = random.Random(f"ids/{world.plan.seed}")
    with ExitStack() as stack:
        for module in (background, dropping, tables):
            stack.enter_context(mock.patch.object(module, "new_id", lambda: f"{rng.getrandbits(128):032x}"))
        stack.enter_context(mock.patch.object(following, "ROWS_AT_ONCE", _ROWS_AT_ONCE))
        yield


def schedule(masters: Masters) -> Iterator[tuple[str, float, Callable[[], None]]]:
    """What happens, and how often a second."""
    yield "heartbeat", 10.0 * _SERVERS, masters.beat
    yield "table", 12.0, masters.table
    yield "look at masters", 2.0, masters.look
    for number, driver in enumerate(masters.drivers):
        yield f"driver {number}", 8.0, driver.act

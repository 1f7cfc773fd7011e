"""Which replicas are on this node. Finds them for requests and messages, and passes time and lost connections
on to them.

Filled by the tablet manager and its starter alone; read by everything that serves. Never waits.

Invariant: a key is here once at most: as a replica, as a tombstone, or held back. A copy may run under the key of the
replica that it fills.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Mapping
from types import MappingProxyType

import structlog

from stele.consensus.copy_target import TabletCopy
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import Superblock
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.effects import Role
from stele.rpc.convert import id_from_pb

log = structlog.get_logger("stele.tserver")

ReplicaListener = Callable[[Replica], None]


class Replicas:
    """The register of a node's replicas. Iterating gives the replicas that were started, FAILED ones too.

    `tombstones`: removed replicas that may have voted. `held`: replicas that are not started yet. `copies`:
    copies that run or have just ended.
    """

    def __init__(self) -> None:
        self._by_key: dict[StreamKey, Replica] = {}
        self._awake: dict[StreamKey, Replica] = {}
        self._noted: list[dict[StreamKey, Replica]] = []  # for each reader, who was awake since it last read
        self._by_tablet: dict[str, dict[int, Replica]] = {}
        # The only replica of each tablet here, by the id that requests carry.
        self._alone: dict[bytes, Replica] = {}
        self._routes: dict[tuple[bytes, int], Replica] = {}
        self.route = self._routes.get
        """The replica that gets a message to (tablet, replica_id); None if it is not here."""
        self._listeners: list[ReplicaListener] = []
        self._tombstones: dict[StreamKey, Superblock] = {}
        self._copies: dict[StreamKey, TabletCopy] = {}
        self._held: dict[StreamKey, Superblock] = {}
        self.tombstones: Mapping[StreamKey, Superblock] = MappingProxyType(self._tombstones)
        self.copies: Mapping[StreamKey, TabletCopy] = MappingProxyType(self._copies)
        self.held: Mapping[StreamKey, Superblock] = MappingProxyType(self._held)
        self._opened = False
        self._fenced = False
        self._withdrawn: frozenset[str] = frozenset()  # tables
        self._heirs: dict[StreamKey, NodeId] = {}  # the tablets that are being handed over

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def opened(self) -> bool:
        """Whether all replicas on the volume are known."""
        return self._opened

    @property
    def fenced(self) -> bool:
        """Whether no replica here may send or answer anything."""
        return self._fenced

    # --- finding

    @property
    def awake(self) -> tuple[Replica, ...]:
        """The replicas that did not rest at the last tick, or were woken since."""
        return tuple(self._awake.values())

    def stirring(self) -> Callable[[], Mapping[StreamKey, Replica]]:
        """Make a function that returns the replicas that were awake at any time since its last call. The
        first call returns all.

        A replica that rests all the time does not change, so nobody need look at it.
        """
        number = len(self._noted)
        self._noted.append(dict(self._by_key))

        def take() -> Mapping[StreamKey, Replica]:
            stirred, self._noted[number] = self._noted[number], dict(self._awake)
            return stirred

        return take

    def keys(self) -> KeysView[StreamKey]:
        """The keys of the replicas that were started."""
        return self._by_key.keys()

    def by_key(self, key: StreamKey) -> Replica | None:
        """The replica with exactly this id."""
        return self._by_key.get(key)

    def current(self, tablet_id: str) -> Replica | None:
        """The replica of a tablet that is here. Of several, the one with the highest replica_id, FAILED ones
        last.
        """
        here = self._by_tablet.get(tablet_id)
        return max(here.values(), key=_rank) if here else None

    def get(self, tablet_id: str) -> Replica:
        """As `current`.

        Raises:
            Rejected: NOT_FOUND, or TABLET_DELETED where only a tombstone is left.
            Retryable: NOT_READY while replicas are still being opened; NOT_LEADER while the node is fenced.
        """
        self._refuse_if_fenced()
        replica = self.current(tablet_id)
        if replica is not None:
            return replica
        self.refuse_unless_open()
        if any(key.tablet_id == tablet_id for key in self.tombstones):
            raise Rejected(
                f"tablet {tablet_id[:8]} was removed from this node; ask the masters where it is",
                code=Code.TABLET_DELETED,
            )
        raise Rejected(f"tablet {tablet_id[:8]} is not on this node; ask the masters", code=Code.NOT_FOUND)

    def of_request(self, tablet: bytes) -> Replica:
        """As `for_client`, by the id that a request carries.

        Raises:
            As `for_client`, and Rejected: INVALID_ARGUMENT, it carries no id.
        """
        self._refuse_if_fenced()
        replica = self._alone.get(tablet) or self.get(id_from_pb(tablet))
        if self._withdrawn:
            self._refuse_if_withdrawn(replica)
        return replica

    def for_client(self, tablet_id: str) -> Replica:
        """As `get`, for somebody who reads or writes rows.

        Raises:
            As `get`, and Rejected: TABLET_DELETED, the table was dropped.
        """
        replica = self.get(tablet_id)
        self._refuse_if_withdrawn(replica)
        return replica

    def _refuse_if_withdrawn(self, replica: Replica) -> None:
        if replica.superblock.table_id in self._withdrawn:
            raise Rejected(
                f"the table of tablet {replica.tablet_id[:8]} was dropped and serves nobody; `stele table recall` brings it back",
                code=Code.TABLET_DELETED,
            )

    def _refuse_if_fenced(self) -> None:
        if self._fenced:
            # NOT_READY would have clients ask this node again until their deadline.
            raise Retryable("this node is fenced; ask another one", code=Code.NOT_LEADER)

    def refuse_unless_open(self) -> None:
        """Return if all replicas on the volume are known.

        Raises:
            Retryable: NOT_READY.
        """
        if not self._opened:
            raise Retryable("this node is still opening its replicas; try again", code=Code.NOT_READY)

    def keys_of(self, tablet_id: str) -> list[StreamKey]:
        """The key of a tablet's `current` replica, and the keys of copies whose replica is not here yet."""
        replica = self.current(tablet_id)
        keys = [replica.superblock.key] if replica is not None else []
        return keys + [key for key in self.copies if key.tablet_id == tablet_id and key not in keys]

    def holds(self, tablet_id: str) -> bool:
        """Whether a replica of the tablet is here, started or held back."""
        return tablet_id in self._by_tablet or any(key.tablet_id == tablet_id for key in self.held)

    # --- events

    def tick(self, now_ms: int) -> None:
        """Tell the replicas what time it is. Those at rest are not touched."""
        for key, replica in tuple(self._awake.items()):
            if not replica.tick(now_ms):
                self._awake.pop(key, None)

    def woken(self, key: StreamKey) -> None:
        """Note that a replica is no longer at rest, and needs ticks again."""
        replica = self._by_key.get(key)
        if replica is not None:
            self._stirs(key, replica)

    def _stirs(self, key: StreamKey, replica: Replica) -> None:
        self._awake[key] = replica
        for noted in self._noted:
            noted[key] = replica

    def peer_node_failed(self, node_id: NodeId) -> None:
        """Tell the replicas that the connection to a node was reset."""
        for replica in self._by_key.values():
            replica.peer_node_failed(node_id)

    def peer_node_back(self, node_id: NodeId) -> None:
        """Have the leaders here probe their peers on a node at once: it is connected again, and what was sent meanwhile is
        lost."""
        for replica in self._by_key.values():
            if replica.role is Role.LEADER:
                replica.peer_node_failed(node_id)

    def fit_to_lead(self, fit: bool) -> None:
        """Tell the replicas whether this node's clock is right. If not, they do not stand for election."""
        for replica in self._by_key.values():
            replica.fit_to_lead(fit)

    def fence(self, fenced: bool) -> None:
        """Let no replica send or answer anything from now on, or let them serve again."""
        self._fenced = fenced

    def withdraw(self, table_ids: frozenset[str]) -> None:
        """Have the replicas of these tables, and of no others, refuse clients from now on."""
        self._withdrawn = table_ids

    async def hand_over_leadership(self, timeout_s: float, *, to_any: bool = False) -> None:
        """Hand all leaderships over, and keep those that nobody takes in time.

        `to_any`: if the most advanced voter does not take one over, ask the other voters too. That voter may
        itself be unfit to lead.
        """

        async def hand_over(replica: Replica) -> None:
            others = [p.replica_id for p in replica.config.voters if p.replica_id != replica.replica_id]
            try:
                async with asyncio.timeout(timeout_s):
                    for target in (None, *others) if to_any else (None,):
                        try:
                            await self.transfer(replica, target, leads)
                            return
                        except SteleError as exc:
                            log.info("leadership kept", tablet=replica.tablet_id, error=str(exc))
            except TimeoutError:
                log.info("leadership kept", tablet=replica.tablet_id, error="timed out")

        leaders = [r for r in self if r.is_leader and len(r.config.voters) > 1]
        leads = self.leads()
        await asyncio.gather(*(hand_over(r) for r in leaders))

    def leads(self) -> Counter[NodeId]:
        """How many tablets each node leads, as far as the replicas here know. A tablet that is being handed
        over counts for its next leader.
        """
        known: Counter[NodeId] = Counter(self._heirs.values())
        for replica in self._by_key.values():
            leader = replica.leader_peer()
            if leader is not None and replica.superblock.key not in self._heirs:
                known[leader.node_id] += 1
        return known

    async def transfer(
        self,
        replica: Replica,
        target: ReplicaId | None = None,
        leads: Counter[NodeId] | None = None,
        *,
        cause: str = "",
        at_once: bool = False,
    ) -> None:
        """Hand one leadership to `target`, or to the voter whose node leads least.

        `leads`: the counts by `leads()`, which this call updates. `cause`, `at_once`: as
        `Members.transfer_leadership`.

        Raises:
            As `Members.transfer_leadership`.
        """
        known = self.leads() if leads is None else leads
        heirs = [p for p in replica.config.voters if p.replica_id != replica.replica_id]
        named = [p for p in heirs if target in (None, p.replica_id)]
        heir = min(named, key=lambda p: known[p.node_id], default=None)
        told = {p.node_id: known[p.node_id] for p in heirs}
        if heir is None:
            return await replica.members.transfer_leadership(target, told, cause, at_once=at_once)
        key = replica.superblock.key
        self._heirs[key] = heir.node_id
        known[heir.node_id] += 1
        try:
            await replica.members.transfer_leadership(target, told, cause, at_once=at_once)
        finally:
            self._heirs.pop(key, None)

    def add_listener(self, listener: ReplicaListener) -> None:
        """Call `listener(replica)` for every replica that starts, and now for those that run."""
        self._listeners.append(listener)
        for replica in self:
            listener(replica)

    # --- for the tablet manager

    def all_known(self) -> None:
        """Note that from now on all replicas on the volume are known."""
        self._opened = True

    def add(self, replica: Replica) -> None:
        """Register a replica, so that messages reach it."""
        key = replica.superblock.key
        self._by_key[key] = replica
        self._stirs(key, replica)
        self._by_tablet.setdefault(key.tablet_id, {})[key.replica_id] = replica
        self._routes[bytes.fromhex(key.tablet_id), key.replica_id] = replica
        self._note_alone(key.tablet_id)

    def hold(self, superblock: Superblock) -> None:
        """Note a replica that is on the volume and is not started yet."""
        self._held[superblock.key] = superblock

    def release(self, key: StreamKey) -> None:
        """Note that the replica is no longer held back. Does nothing if it was not."""
        self._held.pop(key, None)

    def bury(self, tombstone: Superblock) -> None:
        """Note a removed replica that is on the volume and may have voted."""
        self._tombstones[tombstone.key] = tombstone

    def copying(self, key: StreamKey, copy: TabletCopy) -> None:
        """Note that a copy runs under this key, in place of an earlier one."""
        self._copies[key] = copy

    def gone(self, key: StreamKey, tombstone: Superblock | None) -> None:
        """Remove the replica and its copy from the register. `tombstone`: what is left of the replica, or
        None.
        """
        if tombstone is not None:
            self.bury(tombstone)
        else:
            self._tombstones.pop(key, None)
        self._copies.pop(key, None)
        self._by_key.pop(key, None)
        self._awake.pop(key, None)
        for noted in self._noted:
            noted.pop(key, None)
        here = self._by_tablet.get(key.tablet_id, {})
        here.pop(key.replica_id, None)
        if not here:
            self._by_tablet.pop(key.tablet_id, None)
        self._routes.pop((bytes.fromhex(key.tablet_id), key.replica_id), None)
        self._note_alone(key.tablet_id)

    def _note_alone(self, tablet_id: str) -> None:
        here = [*self._by_tablet.get(tablet_id, {}).values()]
        if len(here) == 1:
            self._alone[bytes.fromhex(tablet_id)] = here[0]
        else:
            self._alone.pop(bytes.fromhex(tablet_id), None)

    def started(self, replica: Replica) -> None:
        """Tell the listeners that a replica has started."""
        for listener in self._listeners:
            listener(replica)


def _rank(replica: Replica) -> tuple[bool, int]:
    return replica.state is not ReplicaState.FAILED, replica.replica_id

"""Sends heartbeats and reports to every master, and learns who the masters are.

There is one loop per address (master_loop.py). The addresses are those in the leader's list, those in other
masters' lists, and those given at start. The list of a master that does not lead may be old. But it may name
a leader that no other list names.

Two addresses may lead to one master, since names are given and addresses are learned. The node id in the
answers shows that. In that case one loop sends, and the others rest. A resting loop tries again now and then,
because its name may lead elsewhere later.

A given address where nobody answers is tried less and less often, because the name of a retired master stays
in --masters. While fewer than a majority of the masters answer, it is tried each time.

Reports are incremental. A change is sent to a master until that master, as leader, has acknowledged it. A
full report goes to a new leader, after this node's own start, and when a master asks for it. It also goes to
a master that missed more changes than a full report contains.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

import structlog

from stele.model.cluster_version import told
from stele.model.ids import StreamKey
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.identity import PeerBook
from stele.rpc.proto import master_pb2 as pb
from stele.tserver.admission import Admission
from stele.tserver.fences import Fences
from stele.tserver.fencing import Fencing
from stele.tserver.heartbeat_source import HeartbeatSource
from stele.tserver.master_loop import MasterLoop
from stele.tserver.wall_clock import WallClock
from stele.tserver.withdrawal import Withdrawal

log = structlog.get_logger("stele.tserver.heartbeat")


class Heartbeater:
    """The heartbeater of one node. `given`: the addresses in --masters. `remember(addresses)` is called with
    each new list of a leader."""

    def __init__(
        self,
        source: HeartbeatSource,
        admission: Admission,
        fences: Fences,
        fencing: Fencing,
        withdrawal: Withdrawal,
        pool: ChannelPool,
        book: PeerBook,
        wall_clock: WallClock,
        *,
        interval_s: float,
        given: tuple[str, ...],
        remember: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._source = source
        self._admission = admission
        self._fences = fences
        self._fencing = fencing
        self._withdrawal = withdrawal
        self._pool = pool
        self._book = book
        self._wall_clock = wall_clock
        self._interval_s = interval_s
        self._given = given
        self._remember = remember
        self._known: tuple[str, ...] = ()
        self._in_force: frozenset[str] = frozenset()
        self._told: dict[str, tuple[str, ...]] = {}
        self._loops: dict[str, MasterLoop] = {}
        self._addresses_digest = 0
        self._leader_heard = False
        self._cluster_version = 0
        self._remembered = False

    def start(self, known: tuple[str, ...]) -> None:
        """Begin; `known` are the addresses of the masters that the volume remembers."""
        self._known = known
        self._match_loops()

    def changed(self, key: StreamKey) -> None:
        """Send a replica's report soon, and again until a leader has it."""
        for loop in self._loops.values():
            loop.changed(key)

    def load_changed(self, key: StreamKey) -> None:
        """Send a replica's report, whose load has changed, with the next heartbeat. A load is not urgent, so no
        heartbeat is sent earlier for it. The report is repeated until a leader has it, as by `changed`.
        """
        for loop in self._loops.values():
            loop.changed(key, soon=False)

    async def close(self) -> None:
        """Stop."""
        self._admission.close()
        loops, self._loops = list(self._loops.values()), {}
        await asyncio.gather(*(loop.close() for loop in loops))

    @property
    def leader_heard(self) -> bool:
        """Whether a leading master has answered this start."""
        return self._leader_heard

    @property
    def cluster_version(self) -> int:
        """The finalized cluster version that a leading master has sent since this start; 0: none has answered."""
        return self._cluster_version

    @property
    def addresses(self) -> tuple[str, ...]:
        """All masters to send to: those of a leader's last list, those given at start, and those that other
        masters name.
        """
        return tuple(dict.fromkeys((*self._known, *self._given, *self._named)))

    @property
    def _named(self) -> tuple[str, ...]:
        """The addresses that any master names."""
        return (*self._known, *itertools.chain.from_iterable(self._told.values()))

    # --- for the loops (OtherLoops)

    @property
    def addresses_digest(self) -> int:
        """The digest of the nodes' addresses that a leader gave last."""
        return self._addresses_digest

    def speaks(self, loop: MasterLoop) -> bool:
        """Whether this loop sends the heartbeats. If several loops reach one master, only the first in `addresses`
        sends."""
        loops = (other for a in self.addresses if (other := self._loops.get(a)) is not None)
        return next((o for o in loops if o.answers and o.master == loop.master), loop) is loop

    def may_rest(self, loop: MasterLoop) -> bool:
        """Whether this loop may leave its address alone for a while."""
        if loop.answers:
            return not self.speaks(loop)
        answering = {other.master for other in self._loops.values() if other.answers} & self._in_force
        return loop.address not in self._named and 2 * len(answering) > len(self._in_force)

    def leader_answered(self, response: pb.TSHeartbeatResponse) -> None:
        """Take over the lists of a master that leads."""
        self._leader_heard = True
        # It never falls. The answer of an earlier leader may come late.
        self._cluster_version = max(self._cluster_version, told(response.cluster_version))
        self._fences.learned(response.term, response.driver_epoch)
        self._fencing.told(response.fenced, response.term)
        self._withdrawal.told(response, self._soon)
        self._learn_masters(response.masters)
        self._learn_addresses(response)

    def told_masters(self, by: str, response: pb.TSHeartbeatResponse) -> None:
        """Take the list of the master at `by`, which does not lead. The list drops no other known master."""
        masters = tuple(m.address for m in response.masters if m.address)
        if masters and masters != self._told.get(by):
            self._told[by] = masters
            self._match_loops()

    def _soon(self) -> None:
        """Send the next heartbeat soon, because somebody waits for what it says."""
        for loop in self._loops.values():
            loop.soon()

    def _learn_masters(self, infos: Iterable[pb.MasterInfoPB]) -> None:
        infos = list(infos)
        masters = tuple(m.address for m in infos if m.address)
        self._in_force = frozenset(id_from_pb(m.node_id) for m in infos)
        if masters and masters != self._known:
            log.info("masters", addresses=masters)
            self._known = masters
            self._told.clear()
            self._match_loops()
            self._remembered = False
        if masters and not self._remembered:
            self._remembered = True
            self._remember(masters)

    def _learn_addresses(self, response: pb.TSHeartbeatResponse) -> None:
        """Learn the nodes' addresses.

        A configuration holds the addresses of the time when it was written. All peers may have moved since,
        as after a power failure of a whole cluster. Then no node would find another.
        """
        for one in response.addresses:
            node_id = id_from_pb(one.node_id)
            if node_id != self._pool.identity.node_id:
                self._book.told(node_id, one.incarnation, one.address)
        self._addresses_digest = response.addresses_digest

    def _match_loops(self) -> None:
        for address in self.addresses:
            if address not in self._loops:
                self._loops[address] = MasterLoop(
                    address,
                    self,
                    self._source,
                    self._admission,
                    self._pool,
                    self._wall_clock,
                    self._interval_s,
                )
        while gone := [a for a in self._loops if a not in self.addresses]:
            for address in gone:
                self._told.pop(address, None)
                self._loops.pop(address).end()
        self._admission.expect(self.addresses)

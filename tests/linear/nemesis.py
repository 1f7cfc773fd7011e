"""Carries out the faults of a plan on real processes, each for its time, and undoes them all. Called by __main__.

Owns no process: it strikes those of the cluster that it is given. Invariant: after `end` no member is paused, cut off or
dead, except one that was lost for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stele.client.leader_search import find_leader
from stele.client.locations import ReplicaPlace, TabletPlace
from stele.model.errors import SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from tests.harness.processes import Cluster, Member
from tests.linear.network import CLIENTS, Cut, Network, both_ways
from tests.linear.plan import CUTS, Deed, Fault, Victim

_ASK_TIMEOUT_S = 2.0


class Nemesis:
    """`places` gives the tablets of the moment; `tell` takes what was done, in words."""

    def __init__(
        self,
        cluster: Cluster,
        network: Network | None,
        places: Callable[[], list[TabletPlace]],
        tell: Callable[[str], None],
    ) -> None:
        self.lost: set[str] = set()
        self._cluster = cluster
        self._network = network
        self._places = places
        self._tell = tell
        self._pool = ChannelPool(Identity())
        self._struck: set[str] = set()

    async def run(self, faults: tuple[Fault, ...]) -> None:
        """Strike as planned; returns when the last fault is undone."""
        await asyncio.gather(*(self._strike(fault) for fault in faults))

    async def end(self) -> None:
        """Undo whatever is not undone yet: everyone is to live and to reach everyone."""
        if self._network is not None:
            self._network.mend_all()
        for member in self._cluster.members:
            self._cluster.resume(member)
            if member.name not in self.lost and not member.running:
                self._cluster.restart(member)
        await self._pool.close()

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.deed is Deed.BLACKOUT:
            await self._blackout(fault)
            return
        member = await self._victim(fault)
        if member is None:
            self._tell(f"{fault.deed.value}: no {fault.victim.value} known")
        elif fault.deed is Deed.TRANSFER:
            await self._transfer(fault)
        elif member.name in self._struck:
            self._tell(f"{fault.deed.value} {member.name}: it suffers already")
        else:
            self._struck.add(member.name)
            self._tell(f"{fault.deed.value} {member.name} ({fault.victim.value}), {fault.for_s:.2f} s")
            await self._hurt(fault, member)
            self._tell(f"{fault.deed.value} {member.name} is over")
            if fault.deed is not Deed.LOSE:
                self._struck.discard(member.name)

    async def _blackout(self, fault: Fault) -> None:
        """Everyone who does not suffer already."""
        members = [m for m in self._cluster.members if m.name not in self._struck]
        names = {member.name for member in members}
        self._struck |= names
        self._tell(f"blackout of {', '.join(sorted(names))}, {fault.for_s:.2f} s")
        for member in members:
            self._cluster.kill(member)
        await asyncio.sleep(fault.for_s)
        for member in members:
            self._cluster.restart(member)
        self._struck -= names
        self._tell("blackout is over")

    async def _hurt(self, fault: Fault, member: Member) -> None:
        if fault.deed is Deed.LOSE:
            self.lost.add(member.name)
            self._cluster.lose(member)
        elif fault.deed is Deed.KILL:
            self._cluster.kill(member)
            await asyncio.sleep(fault.for_s)
            self._cluster.restart(member)
        elif fault.deed is Deed.PAUSE:
            self._cluster.pause(member)
            await asyncio.sleep(fault.for_s)
            self._cluster.resume(member)
        elif fault.deed in CUTS and self._network is not None:
            number = self._network.cut(self._cuts(fault, member))
            await asyncio.sleep(fault.for_s)
            self._network.mend(number)

    def _cuts(self, fault: Fault, member: Member) -> frozenset[Cut]:
        others = [m.host for m in self._cluster.members if m is not member]
        one = others[fault.pick % len(others)]
        match fault.deed:
            case Deed.ISOLATE:
                cuts = [both_ways(member.host, other) for other in (*others, CLIENTS)]
                return frozenset[Cut]().union(*cuts)
            case Deed.DEAFEN:
                return frozenset((other, member.host) for other in others)
            case Deed.MUTE:
                return frozenset((member.host, other) for other in others)
            case Deed.PART:
                return both_ways(member.host, one)
            case Deed.PART_ONE_WAY:
                return frozenset(((member.host, one),))
            case _:
                return both_ways(member.host, CLIENTS)

    async def _victim(self, fault: Fault) -> Member | None:
        if fault.victim is Victim.MASTER:
            return self._cluster.masters[fault.pick % len(self._cluster.masters)]
        if fault.victim is Victim.CATALOG_LEADER:
            replicas = tuple(ReplicaPlace(m.node_id, m.address, "") for m in self._cluster.masters)
            place = TabletPlace(CATALOG_TABLET_ID, 0, replicas)
        else:
            place = self._place(fault)
        _, leader = await find_leader(self._pool, place)
        if not leader:
            return None
        if fault.victim is not Victim.FOLLOWER:
            return self._cluster.member(leader)
        followers = [r.node_id for r in place.replicas if r.node_id != leader]
        return self._cluster.member(followers[fault.pick % len(followers)])

    def _place(self, fault: Fault) -> TabletPlace:
        places = self._places()
        return places[fault.pick % len(places)]

    async def _transfer(self, fault: Fault) -> None:
        place = self._place(fault)
        _, leader = await find_leader(self._pool, place)
        if not leader:
            return
        request = consensus_pb2.LeaderStepDownRequest(tablet_id=id_to_pb(place.tablet_id))
        address = self._cluster.member(leader).address
        try:
            await self._pool.unary(
                address, ConsensusServiceStub, "LeaderStepDown", request, timeout_s=_ASK_TIMEOUT_S
            )
            told = "done"
        except SteleError as exc:
            told = str(exc)
        self._tell(f"transfer from {self._cluster.member(leader).name}: {told}")

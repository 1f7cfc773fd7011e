"""Which masters' word a start needs before its replicas may vote: is its volume the newest of its node?

A master refuses an older copy by what it heard of the newest (see stele.master.liveness.refuse_older); what counts here
is who was asked. Pure; fed by heartbeats.

Invariant: what a start tells is remembered by masters only once the leader, which has read all of the catalog, and a
majority that had one to read did not refuse it: what cannot judge an older copy must not make it judge the newest.
"""

from __future__ import annotations

from stele.model.ids import NodeId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


class Vouchers:
    """The masters that heard this start and did not refuse it. `given`: how many there are until one of them says."""

    def __init__(self, own: NodeId, role: str, given: int) -> None:
        self._own = own
        self._is_master = role == "master"
        self._given = given
        self._heard: set[str] = set()
        self._read: set[str] = set()
        self._leader = False
        self._term = -1
        self._masters: frozenset[str] = frozenset()

    def answered(self, response: master_pb2.TSHeartbeatResponse) -> None:
        """A master did not refuse. It names the masters if it has a catalog."""
        master = id_from_pb(response.node_id)
        self._heard.add(master)
        self._leader = self._leader or response.is_leader
        if response.masters:
            self._read.add(master)
            if response.term >= self._term:
                self._term = response.term
                self._masters = frozenset(id_from_pb(m.node_id) for m in response.masters)

    @property
    def vetted(self) -> bool:
        """The leader and a majority of those that have a catalog vouch: masters may count on what this start tells."""
        return self._leader and 2 * len(self._read & self._masters) > len(self._masters)

    @property
    def may_open(self) -> bool:
        """Replicas may open. At a start of all, no master has a catalog before they elect a leader: then all others'
        word is enough for a master."""
        if self.vetted or not self._is_master:
            return self.vetted
        heard = self._heard | {self._own}
        return self._masters <= heard if self._masters else len(heard) >= self._given

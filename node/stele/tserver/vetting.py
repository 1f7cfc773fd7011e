"""Which masters' word a start needs before its replicas may vote: is its volume the newest of its node?

A master refuses an older copy by what it heard of the newest (see stele.master.liveness.refuse_older); what counts here
is that so many were asked that one of them must know. Pure; fed by heartbeats.

Invariant: enough masters have vouched only if any majority that heard the newest start shares a member with them.
"""

from __future__ import annotations

from stele.model.ids import NodeId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


class Vouchers:
    """The masters that heard this start and did not refuse it. `given`: how many the command line names."""

    def __init__(self, own: NodeId, role: str, given: int) -> None:
        self._is_master = role == "master"
        self._given = given
        self._vouched: set[str] = {own} if self._is_master else set()
        self._leader = False
        self._term = -1
        self._masters: frozenset[str] = frozenset()

    def answered(self, response: master_pb2.TSHeartbeatResponse) -> None:
        """A master did not refuse. What it says before it has read a catalog counts for masters only: at a start of
        all, nobody has one before they elect a leader."""
        if not response.masters and not self._is_master:
            return
        self._vouched.add(id_from_pb(response.node_id))
        self._leader = self._leader or response.is_leader
        if response.masters and response.term >= self._term:
            self._term = response.term
            self._masters = frozenset(id_from_pb(m.node_id) for m in response.masters)

    @property
    def enough(self) -> bool:
        """A majority of the masters; for a node the leader among them, which has read all of the catalog."""
        if not self._is_master and not self._leader:
            return False
        if not self._masters:
            return 2 * len(self._vouched) > self._given
        return 2 * len(self._vouched & self._masters) > len(self._masters)

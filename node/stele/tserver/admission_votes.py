"""Counts the masters' votes on a start: is this volume the newest of its node? Pure; `Admission` passes in
what heartbeats brought.

A master refuses a start of an older copy, because it has heard of a newer one
(stele.master.liveness.refuse_older). This module counts the last answer of each master that was asked.

Invariants:
- A start is admitted once the leader, and a majority of the masters that had a catalog to read, have answered
  without refusing it. Only then do masters store what it reports. Otherwise a start that nobody could judge
  might make them refuse the newest one.
- Only a majority can refuse a start that was admitted. One master's `doubt` may end any other start
  (admission.py).
- A volume is condemned only when a majority says that it is an older copy.
"""

from __future__ import annotations

from stele.model.errors import Code, StartRefused, SteleError
from stele.model.ids import NodeId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


def newest(error: SteleError) -> int:
    """The incarnation of the node's newest start that the refusing master knows; 0 if it does not say."""
    return error.newest if isinstance(error, StartRefused) else 0


class AdmissionVotes:
    """The votes on one start of node `own`. `given`: the number of masters in the options, used until a
    master gives the real number."""

    def __init__(self, own: NodeId, role: str, given: int) -> None:
        self._own = own
        self._is_master = role == "master"
        self._heard: set[str] = set()
        self._read: set[str] = set()
        self._as_leader: set[str] = set()
        self._at: dict[str, str] = {}  # which master answered last at an address
        self._term = -1
        self._masters: frozenset[str] = frozenset()
        self._given = given
        self._refusals: dict[str, SteleError] = {}

    def refused(self, address: str, error: SteleError) -> None:
        """Count the refusal of the master at `address`.

        A master of an earlier release does not name itself. It counts as the master that answered at
        `address` last, or else by its address.
        """
        named = error.master if isinstance(error, StartRefused) else ""
        master = named or self._at.get(address, address)
        self._is_at(address, master)
        self._refusals[master] = error
        # What it said before no longer counts. Only a majority ends a start that was admitted once.
        if not self.admitted:
            for votes in (self._heard, self._read, self._as_leader):
                votes.discard(master)

    def _is_at(self, address: str, master: str) -> None:
        self._at[address] = master
        if master != address:  # a refusal from there without a name was this master's
            self._refusals.pop(address, None)

    @property
    def verdict(self) -> SteleError | None:
        """The refusal of a majority of the masters; None if fewer refuse.

        VOLUME_OLD if a majority gives that reason, else the error of `doubt`.
        """
        refusals = list(self._refusals.values())
        masters = max((r.masters for r in refusals if isinstance(r, StartRefused)), default=0)
        needed = max(masters, len(self._masters)) or self._given
        old = [r for r in refusals if r.code is Code.VOLUME_OLD]
        if 2 * len(old) > needed:
            return old[-1]
        return self.doubt if 2 * len(refusals) > needed else None

    @property
    def doubt(self) -> SteleError | None:
        """The error of a master that refuses this start; None if none does.

        STALE_INCARNATION comes before other codes. Of several such errors it is the one with the newest
        incarnation.
        """
        refusals = sorted(self._refusals.values(), key=lambda r: (r.code is Code.VOLUME_OLD, -newest(r)))
        return refusals[0] if refusals else None

    def answered(self, address: str, response: master_pb2.TSHeartbeatResponse) -> None:
        """Count the answer of the master at `address`, which did not refuse. It names the masters if it has a
        catalog.
        """
        master = id_from_pb(response.node_id)
        self._is_at(address, master)
        self._refusals.pop(master, None)
        self._heard.add(master)
        if response.is_leader:
            self._as_leader.add(master)
        if response.masters:
            self._read.add(master)
            if response.term >= self._term:
                self._term = response.term
                self._masters = frozenset(id_from_pb(m.node_id) for m in response.masters)

    @property
    def admitted(self) -> bool:
        """Whether the leader and a majority of the masters with a catalog admit it. Then masters may rely on
        what it reports."""
        return bool(self._as_leader) and 2 * len(self._read & self._masters) > len(self._masters)

    @property
    def may_open(self) -> bool:
        """Whether replicas may open.

        On a plain node they may once the start is admitted. When all masters start at once, none has a
        catalog before they elect a leader. So a master may also open its replicas once every other master has
        answered without a refusal.
        """
        if self.admitted or not self._is_master:
            return self.admitted
        heard = self._heard | {self._own}
        return self._masters <= heard if self._masters else len(heard) >= self._given

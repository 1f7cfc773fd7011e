"""The versions that nodes and masters run, from a cluster view. Pure; used by operator and clients.

It does not import the client, which would cost the operator 10 MB of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.model.cluster_version import CLUSTER_VERSION, told
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


@dataclass(frozen=True, slots=True)
class MemberVersion:
    """A node or master that is not retired. `release`: "" if it has not registered yet. `reads`: the newest
    cluster version that it can read.
    """

    node_id: str
    name: str
    role: str
    release: str
    reads: int

    @property
    def label(self) -> str:
        """Its role, and its name or the first digits of its id."""
        return f"{self.role} {self.name or self.node_id[:8]}"


@dataclass(frozen=True, slots=True)
class ClusterVersions:
    """The versions in a cluster. `finalized`: the cluster version in force. `newest`: the newest that this
    program can read.
    """

    finalized: int
    newest: int
    members: tuple[MemberVersion, ...]

    @property
    def possible(self) -> int:
        """The newest version that all members can read."""
        return min((m.reads for m in self.members), default=self.finalized)

    @property
    def lagging(self) -> tuple[MemberVersion, ...]:
        """Members that cannot read the newest version of this program."""
        return tuple(m for m in self.members if m.reads < self.newest)


def versions_of(view: master_pb2.GetClusterViewResponse) -> ClusterVersions:
    """The versions in a cluster view."""
    members = [
        MemberVersion(
            id_from_pb(node.node_id),
            node.name,
            node.registration.role or "node",
            node.registration.version,
            told(node.registration.cluster_version),
        )
        for node in view.nodes
        if node.state != master_pb2.RETIRED and (node.formed or node.ever_heard)
    ]
    members.sort(key=lambda m: (m.role, m.name, m.node_id))
    return ClusterVersions(told(view.cluster_version), CLUSTER_VERSION, tuple(members))

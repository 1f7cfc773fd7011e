"""The cluster version for administrators: what is finalized, what each member runs, and how it is finalized.

Used by the command line and the operator; programs take it from `stele.client.admin`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.driver.keeping import pages_of, whole_view
from stele.model.cluster_version import CLUSTER_VERSION, told
from stele.model.errors import Code, Rejected
from stele.rpc.convert import id_from_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2


@dataclass(frozen=True, slots=True)
class MemberVersion:
    """A node or master that is not retired. `release`: "" if it has not registered yet. `reads`: the newest cluster
    version that it reads."""

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
    """`finalized`: the cluster version in force. `newest`: that of this program."""

    finalized: int
    newest: int
    members: tuple[MemberVersion, ...]

    @property
    def possible(self) -> int:
        """The newest that all members read."""
        return min((m.reads for m in self.members), default=self.finalized)

    @property
    def lagging(self) -> tuple[MemberVersion, ...]:
        """Members that do not read what this program's version allows."""
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


async def cluster_versions(masters: Masters, *, timeout_s: float = 15.0) -> ClusterVersions:
    """What is finalized, and what each member runs, from the leader master.

    Raises:
        SteleError: no master leads within `timeout_s`.
    """
    return versions_of(await whole_view(pages_of(masters, timeout_s=timeout_s)))


async def finalize_version(masters: Masters, *, timeout_s: float = 15.0) -> int:
    """Finalize this program's cluster version. Returns the one in force then. Repeating it changes nothing.

    Raises:
        Rejected: UNSAFE_CHANGE, a member is silent or of an earlier version; UNSUPPORTED_VERSION, the leader master is.
        Retryable: no master leads within `timeout_s`, or it has not heard all members yet.
    """
    request = master_pb2.FinalizeClusterVersionRequest(cluster_version=CLUSTER_VERSION)
    try:
        answer = await masters.call("FinalizeClusterVersion", request, timeout_s=timeout_s)
    except Rejected as exc:
        if exc.code is not Code.UNSUPPORTED_VERSION:
            raise
        raise Rejected(
            f"the leader master runs a release that cannot finalize cluster version {CLUSTER_VERSION}; upgrade all masters "
            "first",
            code=exc.code,
        ) from exc
    return int(answer.cluster_version)

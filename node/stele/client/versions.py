"""The cluster version for administrators: what is finalized, what each member runs, and how it is finalized.

Used by the command line; programs take it from `stele.client.admin`.
"""

from __future__ import annotations

from stele.driver.keeping import pages_of, whole_view
from stele.driver.versions import ClusterVersions, versions_of
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, Rejected
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2


async def cluster_versions(masters: Masters, *, timeout_s: float = 15.0) -> ClusterVersions:
    """What is finalized, and what each member runs, from the leading master.

    Raises:
        SteleError: no master leads within `timeout_s`.
    """
    return versions_of(await whole_view(pages_of(masters, timeout_s=timeout_s)))


async def finalize_version(masters: Masters, *, timeout_s: float = 15.0) -> int:
    """Finalize this program's cluster version. Returns the one in force then. Repeating it changes nothing.

    Raises:
        Rejected: UNSAFE_CHANGE: a member is silent, or of an earlier release. UNSUPPORTED_VERSION: the
            leading master is of an earlier release.
        Retryable: no master leads within `timeout_s`, or it has not heard all members yet.
    """
    request = master_pb2.FinalizeClusterVersionRequest(cluster_version=CLUSTER_VERSION)
    try:
        answer = await masters.call("FinalizeClusterVersion", request, timeout_s=timeout_s)
    except Rejected as exc:
        if exc.code is not Code.UNSUPPORTED_VERSION:
            raise
        raise Rejected(
            f"the leading master runs a release that cannot finalize cluster version {CLUSTER_VERSION}; upgrade all masters "
            "first",
            code=exc.code,
        ) from exc
    return int(answer.cluster_version)

"""The cluster version: which members lag, when it is finalized, and which changes wait for it. Called on the
leader by service.py and by all that write something new.

Invariants: it only rises. It is finalized only while every member is heard and can read it, so every member
can read what is written afterwards. From then on a member of an earlier version is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import structlog

from stele.master.catalog import Catalog
from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.master.records import NodeRecord
from stele.model.cluster_version import CHANGES, CLUSTER_VERSION, told
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.master")

NAMED_MAX = 5
"""The most members that a refusal names."""
CLUSTER_LOCK = "cluster"
"""The lock that is held while the cluster's row is changed."""


def require_version(lead: Leadership, version: int, what: str) -> None:
    """Refuse `what` until this cluster version is finalized.

    Raises:
        Rejected: UNSUPPORTED_VERSION, with what to do.
    """
    present = lead.catalog.cluster_version
    if present < version:
        raise Rejected(
            f"{what}: this needs cluster version {version}, but the cluster has {present}, so that the release before can "
            "come back; once all masters and nodes run this release, `stele cluster finalize` allows it",
            code=Code.UNSUPPORTED_VERSION,
        )


def require_readers(lead: Leadership, version: int, what: str) -> None:
    """Refuse `what` while a live member could not read its result. Used for changes that do not wait for
    `finalize`.

    After such a change, the release before cannot come back on all volumes.

    Raises:
        Rejected: UNSUPPORTED_VERSION, with the members that lag.
        Retryable: NOT_READY, a live member has not reported its version.
    """
    if lead.catalog.cluster_version >= version:
        return
    lagging = [
        why for row in _members(lead) if lead.is_alive(row) and (why := _why_lagging(lead, row, version))
    ]
    if lagging:
        raise Rejected(
            f"{what}: this needs cluster version {version} on all that answer: {'; '.join(lagging[:NAMED_MAX])}",
            code=Code.UNSUPPORTED_VERSION,
        )


def refuse_earlier(catalog: Catalog, request: master_pb2.TSHeartbeatRequest) -> None:
    """Refuse a start whose program cannot read what the cluster may hold.

    Raises:
        Rejected: UNSUPPORTED_VERSION, with what to do.
    """
    if not request.HasField("registration"):
        return
    registration, present = request.registration, catalog.cluster_version
    newest = told(registration.cluster_version)
    if newest >= present:
        return
    node_id = id_from_pb(request.node_id)
    row = catalog.nodes.get(node_id)
    name = (row.name if row is not None else "") or node_id
    raise Rejected(
        f"{registration.role or 'node'} {name} runs release {registration.version or '(unknown)'}, which reads cluster "
        f"version {newest}, but {present} is finalized; start it with a newer release on the same volume",
        code=Code.UNSUPPORTED_VERSION,
    )


async def finalize(lead: Leadership, request: master_pb2.FinalizeClusterVersionRequest) -> int:
    """Finalize a cluster version. Returns the version in force; a repeated request changes nothing.

    Raises:
        Rejected: UNSUPPORTED_VERSION, the leader cannot read it. UNSAFE_CHANGE, with the names of the members
            that lag.
        Retryable: NOT_READY, this leader has not heard all members yet.
    """
    asked = request.cluster_version or CLUSTER_VERSION
    if asked > CLUSTER_VERSION:
        raise Rejected(
            f"cluster version {asked}: the leading master reads up to {CLUSTER_VERSION}; upgrade the masters first",
            code=Code.UNSUPPORTED_VERSION,
        )
    async with lead.locks.hold(tables=(CLUSTER_LOCK,)):
        cluster = lead.catalog.cluster
        if cluster is None or asked <= cluster.cluster_version:
            return lead.catalog.cluster_version
        lead.check_settled()
        lagging = [why for row in _members(lead) if (why := _why_lagging(lead, row, asked))]
        if lagging:
            more = f"; {len(lagging) - NAMED_MAX} more" if len(lagging) > NAMED_MAX else ""
            raise Rejected(
                f"cluster version {asked} cannot be finalized: {'; '.join(lagging[:NAMED_MAX])}{more}",
                code=Code.UNSAFE_CHANGE,
            )
        await lead.commit([swap(cluster, replace(cluster, cluster_version=asked))])
    log.info("cluster version finalized", version=asked, allows=CHANGES.get(asked, ""))
    return asked


def _members(lead: Leadership) -> Iterator[NodeRecord]:
    """All nodes that have started once and are not RETIRED, and all masters that are in force or live."""
    masters = {peer.node_id for peer in lead.log.committed_config.peers}
    for row in lead.catalog.nodes.values():
        if row.role == "master":
            if row.node_id in masters or lead.is_alive(row):
                yield row
        elif row.formed and row.state != "RETIRED":
            yield row
    for node_id in sorted(masters - set(lead.catalog.nodes)):
        yield NodeRecord(node_id, "master", "ACTIVE", formed=True)


def _why_lagging(lead: Leadership, row: NodeRecord, version: int) -> str:
    """Why a member keeps this version from being finalized; "" if it does not.

    Raises:
        Retryable: NOT_READY, the member has not reported its version yet.
    """
    name = f"{row.role} {row.name or row.node_id[:8]}"
    if not lead.is_alive(row):
        return f"{name} is silent, so what it runs is not known; start it, or retire it"
    life = lead.liveness.nodes.get(row.node_id)
    registration = life.registration if life is not None else None
    if registration is None:
        raise Retryable(
            f"{name} has not reported its version to this leader yet; try again", code=Code.NOT_READY
        )
    newest = told(registration.cluster_version)
    if newest >= version:
        return ""
    release = registration.version or "(unknown)"
    return f"{name} runs release {release}, which reads cluster version {newest}; upgrade it"

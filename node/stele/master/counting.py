"""Sets how many masters the cluster has. Called by service.py on the leader.

Writes the cluster's row only. A driver then brings the catalog to that many masters, one change at a time, as
it does with the replicas of any tablet. Invariants: a number is recorded only if there are enough masters in
service for it. Where a TabletCluster describes the cluster, only its driver sets the number, under its epoch.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from stele.master.driving import check_epoch, commit_order
from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.master.versions import CLUSTER_LOCK, require_version
from stele.model.config import MemberType
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.master")

MASTER_COUNTS = (1, 3, 5)


async def set_master_count(lead: Leadership, request: master_pb2.SetMasterCountRequest) -> int:
    """Set the number of masters. Returns the number before. Setting the present number changes nothing.

    Raises:
        Rejected: INVALID_ARGUMENT, it is not one of MASTER_COUNTS, too few masters were started for it, or an
            administrator asks although a TabletCluster describes the cluster. STALE_EPOCH.
            UNSUPPORTED_VERSION, the cluster version is not finalized. The operator of the release before
            could still come back. It would take removed masters for lost ones.
        Retryable: NOT_READY, too few of the masters that are to stay answer now.
    """
    count = request.masters
    if count not in MASTER_COUNTS:
        raise Rejected(f"{count} masters: expected 1, 3 or 5")
    async with lead.locks.hold(tables=(CLUSTER_LOCK,)):
        if request.epoch:
            check_epoch(lead, request.epoch)
        cluster = lead.catalog.cluster
        if cluster is None:
            raise Retryable("the cluster is not in the catalog yet; try again", code=Code.NOT_READY)
        before = cluster.masters
        if count == before:
            return before
        owner = lead.catalog.policy.owner if lead.catalog.policy is not None else ""
        if owner.startswith("TabletCluster") and not request.epoch:
            raise Rejected(
                f"{count} masters: {owner} describes this cluster; change its spec.masters.replicas instead. The number "
                f"stays {before}"
            )
        require_version(lead, 2, f"{count} masters")
        lead.check_settled()
        if count < before:
            _check_shrink(lead, count)
        else:
            _check_growth(lead, count)
        await commit_order(lead, request.epoch, [swap(cluster, replace(cluster, masters=count))])
        log.info("number of masters set", before=before, masters=count)
    lead.look_at(CATALOG_TABLET_ID)
    return before


def _check_growth(lead: Leadership, count: int) -> None:
    """Refuse more masters than there are machines with a live master in service."""
    able = [
        n
        for n in lead.catalog.nodes.values()
        if n.role == "master" and n.takes_replicas and n.formed and lead.is_alive(n)
    ]
    machines = {n.machine or n.node_id for n in able}
    if len(machines) < count:
        raise Rejected(
            f"{count} masters: only {len(machines)} machines have a master that runs and is in service, and "
            f"each master needs "
            f"its own; start {count - len(machines)} more with `stele master run`, then repeat this"
        )


def _check_shrink(lead: Leadership, count: int) -> None:
    """Refuse a lower number unless that many of the present masters are heard now. Drivers remove silent ones
    first.
    """
    peers = lead.log.committed_config.peers
    nodes = lead.catalog.nodes
    live = [
        p
        for p in peers
        if p.member_type is MemberType.VOTER and (n := nodes.get(p.node_id)) is not None and lead.is_alive(n)
    ]
    if len(live) < count:
        raise Retryable(
            f"{count} masters: only {len(live)} of the present {len(peers)} masters are heard; bring the others "
            f"back first",
            code=Code.NOT_READY,
        )

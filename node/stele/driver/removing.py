"""Removes and demotes replicas: chooses the member, and what must come before. Pure; used by planner.py and
beginning.py.

Invariant: no step leaves too few healthy voters. A leader is moved away before its replica is removed.
"""

from __future__ import annotations

from stele.driver.joining import at, blocked
from stele.driver.situation import Member, Situation
from stele.driver.steps import (
    DemotePeer,
    MoveLeader,
    RemovePeer,
    Step,
)
from stele.driver.targets import Load
from stele.model.config import MemberType


def remove(s: Situation, m: Member, reason: str) -> Step | None:
    """The step that removes `m`, or first moves the leader away from it. Its reason names `m`, then gives
    `reason`.

    A blocked step if too few healthy voters would be left.
    """
    if not s.can_remove(m):
        return blocked(
            s, "UnsafeToRemove", f"{m.name} cannot be removed: too few healthy voters would be left"
        )
    if m.live and m.peer.node_id == s.tablet.leader_node:
        if all(o is m for o in s.good or s.data_voters):
            return blocked(s, "NoHeir", f"{m.name} leads, and no other voter could lead")
        return MoveLeader(*at(s, f"{m.name} leads and must be removed: {reason}"))
    return RemovePeer(*at(s, f"{m.name}: {reason}"), m.peer.replica_id, m.peer.node_id)


def demote(s: Situation, purpose: str) -> Step | None:
    """The step that takes away a dead voter's vote; None if no majority would remain.

    The voter that the intent replaces comes first. A dead witness is removed.
    """
    away = (m for m in s.voters if not m.live and not m.kept)
    bad = sorted(away, key=lambda m: (not m.failed, m.peer.replica_id))
    intended = s.intent.replaces_replica if s.intent is not None else 0
    bad.sort(key=lambda m: m.peer.replica_id != intended)
    for m in bad:
        if m.peer.member_type is MemberType.WITNESS and s.can_remove(m):
            return remove(s, m, f"{m.fault}; {purpose}")
        if s.can_demote(m):
            reason = f"{m.name}: {m.fault}; {purpose}"
            return DemotePeer(*at(s, reason), m.peer.replica_id, m.peer.node_id)
    return None


def replaced_by_joining(s: Situation) -> Member | None:
    """The member to remove now that the joining replica votes: a bad one, first the one that the intent
    names.

    A member that only drains stays until there are enough voters without it, since the tablet may need its
    vote.
    """
    gone = [m for m in s.members if m is not s.joining and not m.live and not m.kept]
    if s.needed <= 0:
        gone += [m for m in s.members if not (m.peer.votes and m.active) and m not in gone]
    intended = s.intent.replaces_replica if s.intent is not None else 0
    return min(gone, key=lambda m: (m.peer.replica_id != intended, m.peer.replica_id), default=None)


def remove_replaced(s: Situation) -> Step | None:
    """Remove the member that the joining replica replaces, once it votes."""
    joining = s.joining
    if s.intent is None or joining is None:
        return None
    replaced = replaced_by_joining(s)
    if replaced is None:
        return None
    return remove(
        s,
        replaced,
        f"{replaced.fault or ('it moves' if replaced.leaving else 'spare')}; {joining.name} "
        f"{_arrived(joining)} and has taken its place",
    )


def remove_excess(s: Situation, load: Load) -> Step | None:
    """Remove a voter if there are more than the replication factor.

    While good voters are missing, a bad voter is removed only if as many live voters with rows are left. A
    good one may then find room on its machine.
    """
    counted = s.voters if s.needed <= 0 else s.data_voters
    if len(counted) <= s.tablet.replication_factor:
        return None
    hosts = [m.node.host if m.node is not None else m.peer.node_id for m in s.voters]
    zones = [m.node.zone if m.node is not None else "" for m in s.voters]
    for m in sorted(
        s.voters,
        key=lambda m: (
            m.live,
            m.active,
            m.peer.node_id in s.tablet.by_hand.pinned,
            m.peer.node_id not in s.tablet.by_hand.avoided,
            -hosts.count(m.node.host) if m.node is not None else -1,
            m.peer.node_id == s.tablet.leader_node,
            -zones.count(m.node.zone) if m.node is not None else -1,
            -load.of(m.peer.node_id),
            -m.peer.replica_id,
        ),
    ):
        if (not m.live or not m.active or s.needed < 0) and s.can_remove(m):
            extra = f"{len(s.voters)} voters, but {s.tablet.replication_factor} are wanted"
            return remove(s, m, f"{extra}; {m.fault}" if m.fault else extra)
    return None


def _arrived(joining: Member) -> str:
    """How a new replica became a voter, in words, with the bytes copied.

    Small copies end between two rounds, so only this text shows them.
    """
    copy = joining.report.copy if joining.report is not None else None
    size = f" after a copy of {copy.bytes_total:,} bytes" if copy is not None and copy.bytes_total else ""
    return f"was promoted{size}"

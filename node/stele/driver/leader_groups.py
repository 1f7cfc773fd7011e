"""Determines which leaders may move to spread them, and to which nodes. Used by `leader_moves.py` and
`leader_leaves.py`; pure.

Keeps the groups from round to round, and remembers that they are spread. So a round over a cluster at rest
computes no assignment.

Invariants: no leader moves to a node that is silent, lost, low on disk, off by its clock or not in service. A
leader that an administrator or this driver moved lately does not move.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.driver.leader_balance import Group, Move, Sites, choose_moves
from stele.driver.leader_loads import choose_exchanges
from stele.driver.leader_trials import NO_LEADER_TRIALS, LeaderTrials
from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation
from stele.driver.view import ClusterView, DataState, NodeView, ReplicaState
from stele.model.clock import CLOCK_OFF_MAX_US
from stele.model.config import MemberType

HEARD_MS = 3_000
"""A node whose last heartbeat is older than this gets no leaders. Nodes send one each second."""
_LATER_US = 1 << 62
"""The end of time: no administrator keeps a leader in its place for longer."""


class Groups:
    """The groups of all running tablets, without a driver's memory of leaders. Renewed where something
    changed.

    `spread`: `choose_moves` found nothing to move in these groups.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, Group] = {}
        self._loads: dict[str, int] = {}
        """The requests of clients per second, by tablet. Tablets without requests are left out."""
        self._kept: set[str] = set()
        """Tablets whose leader an administrator moved at some time."""
        self._spread: tuple[tuple[Group, ...], Sites] | None = None
        """The last input for which nothing was left to move: the groups that differed from `_groups`, and the
        sites of nodes. None: there may be a move.
        """
        self._even: tuple[object, ...] | None = None
        """The last input for which `choose_exchanges` found nothing to move. None: there may be a move."""

    def take(self, tablet_id: str, s: Situation | None) -> None:
        """Take over a tablet that was judged again. `s` None: the tablet is gone."""
        before = self._groups.pop(tablet_id, None)
        group = _group(s, _LATER_US, self._policy, NO_LEADER_TRIALS) if s is not None else None
        if group is not None:
            self._groups[tablet_id] = group
        if group != before:
            self._spread = self._even = None
        load = _load(s)
        if load != self._loads.get(tablet_id, 0):
            self._even = None
        if load:
            self._loads[tablet_id] = load
        else:
            self._loads.pop(tablet_id, None)
        kept = s is not None and s.tablet.leader_kept_until_us
        (self._kept.add if kept else self._kept.discard)(tablet_id)

    def moves(
        self,
        situation: Callable[[str], Situation | None],
        view: ClusterView,
        trials: LeaderTrials,
        most: int,
    ) -> tuple[Move, ...]:
        """The moves to begin with, at most this many. `situation`: a function that gives a tablet's
        situation.
        """
        special = {*trials.moved, *trials.rests, *(tablet_id for tablet_id, _ in trials.refused), *self._kept}
        others: dict[str, Group] = {}
        for tablet_id in sorted(special):
            s = situation(tablet_id)
            group = _group(s, view.now_us, self._policy, trials) if s is not None else None
            if group is not None and group != self._groups.get(tablet_id):
                others[tablet_id] = group
        nodes = [n for n in view.nodes if n.role == "node"]
        sites = Sites({n.node_id: n.zone for n in nodes}, {n.node_id: n.host for n in nodes})
        if self._spread != (tuple(others.values()), sites):
            groups = {**self._groups, **others}
            moves = choose_moves([groups[t] for t in sorted(groups)], most, sites)
            self._spread = None if moves else (tuple(others.values()), sites)
            if moves:
                return moves
        if not self._loads or not trials.loads:
            return ()
        # A node of release 0.1 tells no load. Then counts alone decide.
        scene = tuple(others.values()), sites, trials.calm, most
        if self._even == scene or any(serves(n, self._policy) and n.load is None for n in nodes):
            return ()
        moves = choose_exchanges({**self._groups, **others}, self._loads, most, sites, trials.calm)
        self._even = None if moves else scene
        return moves


def _load(s: Situation | None) -> int:
    """The requests of clients per second at the tablet's leader.

    A new leader counts from 0, and the one before still reports its load for a while. So the highest report
    is taken.
    """
    if s is None or s.tablet.node_role != "node":
        return 0
    return max((m.report.load for m in s.members if m.report is not None and m.live), default=0)


def _group(s: Situation, now_us: int, policy: Policy, trials: LeaderTrials) -> Group | None:
    """The tablet with the nodes that may lead it; None if nobody leads it, or masters do.

    If this driver has just moved the leader, the target counts as leader, since the view may be older.
    """
    leader = s.leader()
    if leader is None or s.tablet.node_role != "node":
        return None
    tablet_id = s.tablet.tablet_id
    node = trials.moved.get(tablet_id, leader.peer.node_id)
    places = {node}
    rests = tablet_id in trials.moved or tablet_id in trials.rests
    stays = s.spare < 0 or rests or s.tablet.leader_kept_until_us > now_us
    if not stays and may_lead(leader, policy):
        places |= {
            m.peer.node_id
            for m in s.members
            if may_lead(m, policy) and (tablet_id, m.peer.node_id) not in trials.refused
        }
    return Group(tablet_id, s.tablet.table_id, node, tuple(sorted(places)))


def may_lead(m: Member, policy: Policy) -> bool:
    """Whether a leader may move to this member."""
    report = m.report
    return (
        m.peer.member_type is MemberType.VOTER
        and (m.live and m.answers and m.may_lead)
        and (m.node is not None and serves(m.node, policy))
        and (report is not None and report.state is ReplicaState.RUNNING)
        and (report.data_state is DataState.READY and report.has_data)
    )


def serves(node: NodeView, policy: Policy) -> bool:
    """Whether the node may get leaders."""
    leaving = (policy.lost, policy.unneeded, policy.retiring or (), policy.parked)
    return (
        node.takes_replicas
        and (node.ever_heard and node.heartbeat_age_ms <= HEARD_MS)
        and not any(node.node_id in nodes for nodes in leaving)
        and not node.disk_low
        and abs(node.clock_ahead_us) <= CLOCK_OFF_MAX_US
    )

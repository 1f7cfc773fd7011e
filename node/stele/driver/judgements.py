"""The situations of all tablets, renewed where something changed. Used by planner and executor.

A tablet is judged again when its view or its intent changed. It is also judged again when one of its nodes
changed in something on which a situation depends. All other situations stay as they were judged. Most tablets
are at rest (`is_quiet`), and a plan skips them. It looks at the others (`restless`). Only the situations of
the others are kept: those of 10,000 tablets would take 7 MB.

Invariant: after `renew`, everything equals what a new object says of the same view. Numbers of nodes that
change all the time are excepted (`_standing`): ages, disk space, clocks, loads. Take these from the view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from stele.driver.leader_groups import serves
from stele.driver.policy import Policy
from stele.driver.situation import Situation, at_rest, is_back, is_dead, judge
from stele.driver.slots import Uses
from stele.driver.targets import Coming
from stele.driver.view import ClusterView, Intent, NodeView, TabletView


def is_quiet(s: Situation) -> bool:
    """Whether no check of the planner can find a step for the tablet, and the tablet delays no other."""
    return (
        at_rest(s)
        and not s.tablet.by_hand
        and all(not m.parked and m.report is not None and not m.report.waits for m in s.members)
    )


class Judgements:
    """The situations of the running tablets under one policy, and counts of all tablets. Starts empty.

    - `replicas`: by node, how many replicas configurations of current tablets give it.
    - `leads`: by leading node, its tablets.
    - `young`: tablets that are not created yet.
    - `coming`: the replicas and bytes that intents bring.
    - `uses`: slots of copies.
    - `unreached`: by node, members that do not answer their leader.
    - `astray`: by role and node, members that are away and not expected.
    """

    def __init__(self, policy: Policy) -> None:
        self.replicas: Counter[str] = Counter()
        self.leads: Counter[str] = Counter()
        self.young: set[str] = set()
        self.coming = Coming()
        self.uses = Uses()
        self.unreached: Counter[str] = Counter()
        self.astray: Counter[tuple[str, str]] = Counter()
        self._policy = policy
        self._restless: dict[str, Situation] = {}
        self._in_order: list[Situation] | None = None
        self._ageing: set[str] = set()
        """Tablets that are judged in each round, because time alone may change their situation."""
        self._nodes: dict[str, NodeView] = {}
        """The nodes as they were when their tablets were last judged."""
        self._standings: dict[str, tuple[object, ...]] = {}
        self._tablets: dict[str, TabletView] = {}
        self._intents: Mapping[str, Intent] = {}
        self._brought: dict[str, tuple[TabletView | None, Intent]] = {}
        """The intents that `coming` counts."""
        self._view: ClusterView | None = None

    def situation(self, tablet_id: str) -> Situation | None:
        """The situation of a running tablet; None for any other tablet."""
        found, tablet = self._restless.get(tablet_id), self._tablets.get(tablet_id)
        if found is not None or self._view is None or tablet is None or tablet.state != "RUNNING":
            return found
        return judge(tablet, self._view, self._policy, self._nodes)

    def restless(self) -> list[Situation]:
        """The situations of all tablets that are not quiet, those with the least to spare first. Do not
        change it.
        """
        if self._in_order is None:
            self._in_order = sorted(self._restless.values(), key=lambda s: (s.spare, s.tablet.tablet_id))
        return self._in_order

    def renew(self, view: ClusterView) -> Iterator[tuple[str, Situation | None]]:
        """Judge again the tablets that changed. Yields each with its new situation; None for a tablet that is
        not running, or gone.

        The caller must take all of them.
        """
        last, self._view = self._view, view
        moved = self._renew_nodes(view)
        due = self._renew_tablets(view, last)
        intents: dict[str, Intent] = {i.tablet_id: i for i in view.intents}
        for tablet_id in intents.keys() | self._intents.keys():
            now, before = intents.get(tablet_id), self._intents.get(tablet_id)
            if now is not before and now != before:
                due.add(tablet_id)
        self._intents = intents
        due |= self._ageing
        if moved:
            due.update(t for t, tablet in self._tablets.items() if self._is_on(tablet, moved))
        for tablet_id in due:
            yield tablet_id, self._judge(tablet_id, view)

    def _is_on(self, tablet: TabletView, nodes: Set[str]) -> bool:
        """Whether the tablet's situation depends on one of these nodes."""
        if any(peer.node_id in nodes for peer in tablet.config.peers):
            return True
        intent = self._intents.get(tablet.tablet_id)
        return intent is not None and intent.target_node in nodes

    def _renew_nodes(self, view: ClusterView) -> set[str]:
        """The nodes that changed in something on which situations depend."""
        standings: dict[str, tuple[object, ...]] = {n.node_id: _standing(n, self._policy) for n in view.nodes}
        moved = {
            n for n in standings.keys() | self._standings.keys() if standings.get(n) != self._standings.get(n)
        }
        for node_id in moved:
            node = view.node(node_id)
            if node is not None:
                self._nodes[node_id] = node
            else:
                del self._nodes[node_id]
        self._standings = standings
        return moved

    def _renew_tablets(self, view: ClusterView, last: ClusterView | None) -> set[str]:
        """The tablets whose view changed, or that are gone."""
        known = self._tablets
        due: set[str] = set()
        for tablet in view.tablets_since(last):
            before = known.get(tablet.tablet_id)
            if before is tablet or before == tablet:
                continue
            if before is not None:
                self._count(before, -1)
            self._count(tablet, 1)
            known[tablet.tablet_id] = tablet
            due.add(tablet.tablet_id)
        if len(known) != len(view.tablets):
            for tablet_id in known.keys() - {t.tablet_id for t in view.tablets}:
                self._count(known.pop(tablet_id), -1)
                due.add(tablet_id)
        return due

    def _count(self, tablet: TabletView, number: int) -> None:
        self.leads[tablet.leader_node] += number
        if tablet.is_current:
            for peer in tablet.config.peers:
                self.replicas[peer.node_id] += number
        if tablet.state in ("PREPARING", "CREATING"):
            (self.young.add if number > 0 else self.young.discard)(tablet.tablet_id)

    def _judge(self, tablet_id: str, view: ClusterView) -> Situation | None:
        self._ageing.discard(tablet_id)
        tablet = self._tablets.get(tablet_id)
        self._bring(tablet_id, tablet)
        before = self._restless.pop(tablet_id, None)
        if before is not None:
            self._sum(before, -1)
        if tablet is None or tablet.state != "RUNNING":
            return None
        situation = judge(tablet, view, self._policy, self._nodes)
        if not is_quiet(situation):
            self._restless[tablet_id] = situation
            self._sum(situation, 1)
        if any(r.unreached_ms for r in tablet.replicas):
            self._ageing.add(tablet_id)
        return situation

    def _bring(self, tablet_id: str, tablet: TabletView | None) -> None:
        """Count the replica and the bytes that the tablet's intent brings."""
        before, intent = self._brought.pop(tablet_id, None), self._intents.get(tablet_id)
        if before is not None:
            self.coming.count(*before, -1)
        if intent is not None:
            self._brought[tablet_id] = tablet, intent
            self.coming.count(tablet, intent, 1)

    def _sum(self, s: Situation, number: int) -> None:
        """Count, over all tablets that are not quiet, what plans ask for."""
        self._in_order = None
        self.uses.count(s, number)
        for m in s.members:
            if not m.answers:
                self.unreached[m.peer.node_id] += number
            if m.astray:
                self.astray[s.tablet.node_role, m.peer.node_id] += number


def _standing(node: NodeView, policy: Policy) -> tuple[object, ...]:
    """The part of a node on which situations depend. If it is equal in two views, the node's tablets are not
    judged again.
    """
    plain = replace(
        node,
        heartbeat_age_ms=0,
        replicas=0,
        disk_free_bytes=0,
        disk_used_bytes=0,
        clock_ahead_us=0,
        wanted_left_ms=0,
        load=None,
    )
    return plain, is_dead(node, policy), is_back(node, policy), serves(node, policy)

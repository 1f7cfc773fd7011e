"""How long a new tablet may take to get its leader. Used by background.py; changes no row.

Nodes that are alive and slow get more time with each replacement. Otherwise each replacement gives them more work, and they
are never done. What is known of that stands in the catalog, so a new leader is as patient as the one before.

Invariant: nobody waits longer for nodes that are gone.
"""

from __future__ import annotations

from stele.master.leadership import Leadership
from stele.master.records import TabletRecord

PATIENCE_MAX = 16
"""How many times `create_timeout_ms` a tablet may take at most to get its leader, if its nodes are slow but alive."""


class Patience:
    """The patience of one leadership with the tablets that are CREATING."""

    def __init__(self, lead: Leadership) -> None:
        self._lead = lead
        self.times = 1
        """By how much `create_timeout_ms` is multiplied now. It doubles when a tablet is replaced whose nodes are all alive."""
        self._doubled_us = 0
        """When it doubled last. Tablets placed before that do not double it again."""
        self._inherit()

    def _inherit(self) -> None:
        """Take over the patience of the leader before, as far as rows tell of it.

        If a tablet still does not run, the time between its last two replacements shows what was given then. The next one
        may have got twice that. Their number tells nothing: tablets of nodes that are gone are replaced as often.
        A tablet that is older than `create_timeout_ms` was waited for. If its age is beyond all patience, it tells
        nothing.
        """
        catalog, now_us = self._lead.catalog, self._lead.wall_us()
        new = [
            t
            for t in map(catalog.tablets.__getitem__, catalog.current)
            if t.state in ("PREPARING", "CREATING")
        ]
        replaced: dict[tuple[str, int], list[int]] = {}
        for table_id in dict.fromkeys(t.table_id for t in new):
            for row in map(catalog.tablets.__getitem__, catalog.tablets_of[table_id]):
                if row.state == "REPLACED":
                    replaced.setdefault((row.table_id, row.ordinal), []).append(row.since_us)
                    self._doubled_us = max(self._doubled_us, row.since_us)
        for row in new:
            ended_us = sorted(replaced.get((row.table_id, row.ordinal), ()))
            wanted = 2 if ended_us else 1
            while (
                wanted < PATIENCE_MAX
                and ended_us[1:]
                and self._timeout_us * wanted <= ended_us[-1] - ended_us[-2]
            ):
                wanted *= 2
            age_us = now_us - row.since_us if row.state == "CREATING" else 0
            while (
                wanted < PATIENCE_MAX
                and self._timeout_us * wanted < age_us <= self._timeout_us * PATIENCE_MAX
            ):
                wanted *= 2
            self.times = max(self.times, wanted)

    @property
    def _timeout_us(self) -> int:
        return self._lead.options.create_timeout_ms * 1000

    def given_us(self, row: TabletRecord) -> int:
        """How long this tablet may be CREATING."""
        slow = 2 * self._alive(row) > len(row.config.peers)  # nobody waits longer for nodes that are gone
        return self._timeout_us * (self.times if slow else 1)

    def replaced(self, row: TabletRecord, now_us: int) -> None:
        """Give the next tablets twice the time, if this one was replaced although all its nodes are alive."""
        alive = self._alive(row) == len(row.config.peers)
        if alive and row.since_us >= self._doubled_us and self.times < PATIENCE_MAX:
            self.times *= 2
            self._doubled_us = now_us

    def _alive(self, row: TabletRecord) -> int:
        """How many of a tablet's peers are on nodes that are alive."""
        lead = self._lead
        nodes = [lead.catalog.nodes.get(p.node_id) for p in row.config.peers]
        return sum(node is not None and lead.is_alive(node) for node in nodes)

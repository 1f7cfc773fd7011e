"""Asks where the logs of new witnesses may begin, for all witnesses that a round begins. Used by executor and
orders.

A log may begin after the newest entry that every live voter with the rows knows to be committed. When each
tablet asked alone, that took most calls of a heal. Invariant: a tablet gets no start if one of these voters
did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stele.driver.asking import Answers, ask
from stele.driver.situation import Situation
from stele.driver.steps import BeginIntent, Step
from stele.driver.view import ClusterView
from stele.model.errors import Retryable, SteleError
from stele.model.ids import OPID_NONE, OpId, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, opid_from_pb

TIMEOUT_S = 5.0


class WitnessStarts:
    """The starts of the witnesses that one round begins."""

    def __init__(self) -> None:
        self._found: dict[str, OpId] = {}
        self._errors: dict[str, SteleError] = {}

    async def look(
        self, pool: ChannelPool, view: ClusterView, steps: Sequence[Step], situations: Mapping[str, Situation]
    ) -> None:
        """Ask for the starts of all witnesses that these steps begin. `situations`: those on which the steps
        were planned.
        """
        voters, wanted = await asyncio.to_thread(_voters, steps, situations)
        if wanted:
            answers = await ask(pool, view, wanted, timeout_s=TIMEOUT_S)
            await asyncio.to_thread(self._learn, voters, answers)

    def _learn(self, voters: Mapping[TabletId, Sequence[str]], answers: Answers) -> None:
        told: dict[tuple[str, str], OpId] = {}
        for node_id, reports in answers.reports.items():
            for status in reports:
                told[id_from_pb(status.tablet_id), node_id] = opid_from_pb(status.last_committed)
        for tablet_id, nodes in voters.items():
            silent = [answers.errors[n] for n in nodes if n in answers.errors and (tablet_id, n) not in told]
            if silent:
                self._errors[tablet_id] = silent[0]
            else:
                known = (told.get((tablet_id, n), OPID_NONE) for n in nodes)
                self._found[tablet_id] = min(known, key=lambda opid: opid.index, default=OPID_NONE)

    def of(self, tablet_id: TabletId) -> OpId:
        """The start for a tablet.

        Raises:
            SteleError: the error that a voter gave instead of an answer.
            Retryable: a voter knows no committed entry yet.
        """
        if error := self._errors.get(tablet_id):
            raise error
        start = self._found.get(tablet_id, OPID_NONE)
        if start == OPID_NONE:
            raise Retryable(
                f"tablet {tablet_id[:8]}: a live voter does not know a committed entry yet; try again"
            )
        return start


def _voters(
    steps: Sequence[Step], situations: Mapping[str, Situation]
) -> tuple[dict[TabletId, list[str]], dict[str, list[TabletId]]]:
    """By tablet: the nodes of the voters to ask. By node: the tablets to ask about."""
    nodes: dict[TabletId, list[str]] = {}
    tablets: dict[str, list[TabletId]] = {}
    for step in steps:
        s = situations.get(step.tablet_id) if isinstance(step, BeginIntent) and step.witness else None
        if s is not None:
            nodes[step.tablet_id] = [m.peer.node_id for m in s.data_voters]
            for node_id in nodes[step.tablet_id]:
                tablets.setdefault(node_id, []).append(step.tablet_id)
    return nodes, tablets

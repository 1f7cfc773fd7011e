"""A tablet that lost a voter is healed by the functions that docs/heal-in-code.md names, in its order, under one cause."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog.testing

from stele.client import AsyncClient
from stele.driver.policy import Policy
from stele.driver.view import ClusterView, NodeState
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.heal import Healer
from stele_operator.masters import MasterLink
from tests.consensus.cluster import WAIT_S
from tests.docs.blocks import ROOT
from tests.docs.sources import Calls, first_missing, steps
from tests.tserver.local import SCHEMA, LocalCluster, count, fill

HEAL = ROOT / "docs" / "heal-in-code.md"
IN_NODES = range(5, 21)
"""Rows that need no Kubernetes."""
ROWS_ARRIVE = (16,)
"""Beside the driver's rounds: of a small tablet they are there before the witness is a member."""
SILENT_MS = 3_000


async def follower(cluster: LocalCluster, link: MasterLink) -> str:
    """The name of a node with a voter that does not lead, once the masters know who leads."""
    async with asyncio.timeout(WAIT_S):
        while True:
            view = (await link.catalog()).view
            tablets = [t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID and t.leader is not None]
            for tablet in tablets:
                node_id = next(p.node_id for p in tablet.config.peers if p.node_id != tablet.leader_node)
                return next(name for name, known in cluster.ids.items() if known == node_id)
            await asyncio.sleep(0.05)


async def passes(
    link: MasterLink, policy: Policy, done: Callable[[ClusterView], bool], events: list[str]
) -> ClusterView:
    """Passes like the operator's, until the view is as wanted. What it would tell as events is added to `events`."""

    async def nobody_hears() -> None: ...

    healer = Healer()
    async with asyncio.timeout(WAIT_S):
        while True:
            view = (await link.catalog()).view
            if done(view):
                return view
            resting = healer.rests(view, policy)
            await healer.run(link, None if resting else view, policy, {}, nobody_hears)
            events += (f"{news.reason} {news.message}" for news in healer.news())
            await asyncio.sleep(0.1)


async def heal(link: MasterLink, dead: str, events: list[str]) -> ClusterView:
    """Until no tablet counts on the dead node; then, its fate's time-out being over, until it is RETIRED; the view then."""

    def moved_away(view: ClusterView) -> bool:
        return not view.intents and all(t.config.peer_on(dead) is None for t in view.tablets)

    def retired(view: ClusterView) -> bool:
        node = view.node(dead)
        return node is not None and node.state is NodeState.RETIRED

    silent = Policy(dead_after_ms=SILENT_MS)
    await passes(link, silent, moved_away, events)
    return await passes(link, replace(silent, lost=frozenset({dead})), retired, events)


def check_cause(events: Sequence[str], lines: Sequence[MutableMapping[str, Any]], dead: str) -> None:
    """The event that tells of the heal, the driver's log and those of the nodes name the same cause."""
    (began,) = (event for event in events if event.startswith("HealBegan") and "its node is silent" in event)
    found = re.search(rf"\((heal/{dead[:8]}-\d+)\)$", began)
    assert found is not None, began
    cause = found[1]
    named = [line for line in lines if str(line.get("cause", "")).startswith(f"{cause}: ")]
    steps = {line["step"] for line in named if line["event"] == "step done"}
    assert {"BeginIntent", "StartCopy", "DemotePeer", "AddWitness", "RemovePeer"} <= steps
    assert {"copy ordered", "copy done"} <= {line["event"] for line in named}
    changes = [line for line in named if line["event"] == "configuration"]
    whys = [str(line["cause"]).rpartition(": ")[2] for line in changes if not line["committed"]]
    assert [why.partition(" of ")[0] for why in whys if " of " in why] == ["MODIFY", "ADD", "REMOVE"]
    assert [why for why in whys if why.endswith("has caught up")]
    assert sum(bool(line["committed"]) for line in changes) >= len(whys)


async def test_a_heal_goes_through_the_functions_that_its_page_names(tmp_path: Path) -> None:
    rows = steps(HEAL)
    assert list(rows) == list(range(1, 25))
    wanted = {function for row in IN_NODES for step in rows[row] for function in step}
    events: list[str] = []
    with Calls(wanted) as calls, structlog.testing.capture_logs() as lines:
        cluster = await LocalCluster(tmp_path, nodes=4).start()
        link = MasterLink(cluster.cluster_id, "test")
        link.learn([cluster.master_address])
        try:
            async with AsyncClient([cluster.master_address], timeout_s=60) as client:
                await client.create_table("t", SCHEMA)
                await fill(client, 100)
                name = await follower(cluster, link)
                await cluster.stop(name)
                calls.record()
                view = await heal(link, cluster.ids[name], events)
                assert await count(client) == 100
        finally:
            await link.close()
            await cluster.close()
    (tablet,) = (t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID)
    assert cluster.ids[name] not in {p.node_id for p in tablet.config.peers}
    assert len(tablet.config.voters) == 3
    for aside in (ROWS_ARRIVE, range(13, 16)):
        chain = [(number, step) for number in IN_NODES if number not in aside for step in rows[number]]
        assert first_missing(calls.made, chain) == ""
    check_cause(events, lines, cluster.ids[name])

"""Another image is rolled out, and back, on real processes under writes: no row is lost, and one pod is away at most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.driver.leader_balance import Group, shares
from stele.driver.wire import view_from_pb
from stele_local.kinds import POD
from tests.operator.cluster import Bench
from tests.operator.test_nodes_whole import running, whole, writing
from tests.operator.test_whole import masters

NEW = "stele/node:new"
PATIENT = {"witnessAfter": "1m", "silentAfter": "10m", "machineLostAfter": "10m"}
"""A machine under load may take many seconds for the start of a pod."""


def is_ready(pod: dict[str, Any]) -> bool:
    """By its condition."""
    found = (pod.get("status") or {}).get("conditions") or ()
    return any((c["type"], c["status"]) == ("Ready", "True") for c in found)


async def leaders(made: Bench) -> list[Group]:
    """Who leads which tablet of the table, and who could."""
    async with AsyncClient(",".join(await masters(made)), timeout_s=60) as client:
        view = view_from_pb(await cluster_view(client.masters))
    return [
        Group(t.tablet_id, t.table_name, t.leader_node, tuple(sorted(p.node_id for p in t.config.voters)))
        for t in view.tablets
        if t.table_name == "flights"
    ]


@pytest.mark.chaos
async def test_another_image_is_rolled_out_and_back_under_writes(tmp_path: Path) -> None:
    async with running(tmp_path, machines=4, nodes=3) as made:
        await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"healing": PATIENT}})
        pods = {p["metadata"]["name"] for p in await made.kube.list("Pod", "default")}
        images = {p["spec"]["containers"][0]["image"] for p in await made.kube.list("Pod", "default")}
        (old,) = images

        def one_away_at_most() -> bool:
            there = {p["metadata"]["name"]: p for p in made.local.store.objects(POD.key)}
            serve = {n for n, p in there.items() if is_ready(p) and "deletionTimestamp" not in p["metadata"]}
            return len(pods - serve) <= 1

        async def all_have(image: str) -> bool:
            now = await made.kube.list("Pod", "default")
            return {p["spec"]["containers"][0]["image"] for p in now} == {image} and await whole(made, 3)

        async with writing(made):
            with made.keep("one pod is away at most", one_away_at_most):
                for image in (NEW, old):
                    await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"image": image}})
                    await made.until(f"all pods have {image}", lambda image=image: all_have(image), 300)

            async def spread() -> bool:
                groups = await leaders(made)
                share, load = shares(groups), Counter(g.leader for g in groups)
                return all(load[n] <= share[n] + 1 for n in load)

            await made.until("no node leads more than one above its share", spread, 300)
        reasons = {e["reason"] for e in await made.events("TabletCluster")}
        assert "Rolling" in reasons and not {"NodeLost", "RollStopped"} & reasons

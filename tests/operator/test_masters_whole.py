"""The number of masters on real processes: 1, 3, 5, 3 under writes, and the operator is killed meanwhile. Then 3, 5, 1, and the
cluster hibernates half way."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.operator.cluster import Bench, bench
from tests.operator.test_hibernate_whole import HASTY, hibernate, pods
from tests.operator.test_nodes_whole import HEALING, running, writing
from tests.operator.test_whole import COLUMNS, HASH, ROWS, count, ready, status, write


async def serve(made: Bench, number: int) -> bool:
    """So many masters hold the catalog and have pods, nobody is on the way, and the identity has the number."""
    now = await status(made)
    masters = [
        m["state"] for m in now.get("members", ()) if m["role"] == "master" and m["state"] != "Retired"
    ]
    pods = await made.kube.list("Pod", "default", "stele.dev/role=master")
    identity = await made.kube.get("ConfigMap", "default", "flights-identity")
    return (
        masters == ["Ready"] * number
        and now.get("readyMasters") == len(pods) == number
        and identity is not None
        and identity["data"]["masters"] == str(number)
    )


async def ask(made: Bench, number: int) -> None:
    """Another spec.masters.replicas."""
    await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"masters": {"replicas": number}}})


async def changing(made: Bench) -> bool:
    """Whether the condition says that the number changes."""
    return (await made.condition("TabletCluster", "flights", "Reconciling"))[1] == "MastersChanging"


@pytest.mark.chaos
async def test_one_three_five_three_under_writes(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=6) as made:
        await made.start()
        await made.apply(
            "cluster",
            masters={"replicas": 1, "storage": {"size": "1Gi"}},
            nodes={"replicas": 3, "storage": {"size": "1Gi"}},
            healing=HEALING,
        )
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"), 240)
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"), 240)
        async with writing(made):
            await ask(made, 3)
            await made.until("it says that the number changes", lambda: changing(made))
            await made.until("three masters serve", partial(serve, made, 3), 300)
            await ask(made, 5)
            await made.until("it says that the number changes", lambda: changing(made))
            await made.end(signal.SIGKILL)
            await asyncio.sleep(1)
            await made.start()
            await made.until("five masters serve", partial(serve, made, 5), 300)
            grown = {n for n in await made.names("Pod") if "master" in n}
            await ask(made, 3)
            await made.until("three masters serve", partial(serve, made, 3), 300)
            gone = grown - await made.names("Pod")
            assert len(gone) == 2

            async def let_go() -> bool:
                claims = {
                    c["metadata"]["name"]: c for c in await made.kube.list("PersistentVolumeClaim", "default")
                }
                return all("stele.dev/released-at" in claims[n]["metadata"]["annotations"] for n in gone)

            await made.until("the claims of the others are let go", let_go)
        reasons = [e["reason"] for e in await made.events("TabletCluster")]
        assert "MasterCountSet" in reasons and not {"MastersLost", "MastersRefused"} & set(reasons)


@pytest.mark.chaos
async def test_it_hibernates_while_the_number_changes_and_five_become_one(tmp_path: Path) -> None:
    async with running(tmp_path, machines=6, nodes=3) as made:
        await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"healing": HASTY}})
        await write(made)
        await ask(made, 5)
        await made.until("it says that the number changes", lambda: changing(made))
        await hibernate(made, True)

        async def hibernated() -> bool:
            return (await made.condition("TabletCluster", "flights", "Ready"))[1] == "Hibernated"

        await made.until("it hibernates", hibernated)
        assert not pods(made)
        await hibernate(made, False)
        await made.until("five masters serve", partial(serve, made, 5), 300)
        assert await count(made) == ROWS
        await ask(made, 1)
        await made.until("one master serves", partial(serve, made, 1), 300)
        assert await count(made) == ROWS
        reasons = {e["reason"] for e in await made.events("TabletCluster")}
        assert not {"MasterLost", "MastersLost", "MastersRefused", "TooManyLost"} & reasons

"""The operator as a process on a one-machine Kubernetes: what it makes, leaves alone, and survives."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from stele_local.kinds import CONFIG_MAP
from stele_operator.plan.naming import ANNOTATION_NODE_ID
from tests.harness.commands import outcome
from tests.harness.template import operator_template
from tests.operator.cluster import Bench, bench

MASTERS = {f"flights-master-{i}" for i in range(3)}


async def masters_started(made: Bench) -> bool:
    """Whether the first masters have pods."""
    return await made.names("Pod") >= MASTERS


async def exists(made: Bench, kind: str) -> bool:
    """Whether there is an object of a kind."""
    return bool(await made.names(kind))


async def led(made: Bench, operators: int) -> bool:
    """Whether so many operators have led, one after the other."""
    lease = await made.kube.get("Lease", "default", "stele-operator")
    return lease is not None and lease["spec"]["leaseTransitions"] == operators - 1


async def test_applied_then_killed_and_started_again_everything_is_there_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.start()
        nodes = {"replicas": 3, "storage": {"size": "1Gi"}}
        await made.apply("cluster", nodes=nodes, deletionPolicy="Delete")
        # As soon as there is one, and others are to come. The one before may have made a claim already.
        for number, kind in enumerate(("Lease", "ConfigMap", "PersistentVolumeClaim"), 1):
            await made.until(f"there is a {kind}", partial(exists, made, kind))
            await made.until(f"operator {number} leads", partial(led, made, number))
            await made.end(signal.SIGKILL)
            await made.start()
        await made.until("the last one leads", lambda: led(made, 4))
        await made.until("the first masters have pods", lambda: masters_started(made))
        assert await made.names("PersistentVolumeClaim") >= MASTERS
        assert await made.names("Service") >= {"flights-peers", "flights-masters"}
        assert await made.names("PodDisruptionBudget") == {"flights-masters", "flights-nodes"}
        masters = [p for p in await made.kube.list("Pod", "default") if p["metadata"]["name"] in MASTERS]
        claims = {c["metadata"]["name"]: c for c in await made.kube.list("PersistentVolumeClaim", "default")}
        for pod in masters:
            claim = claims[pod["metadata"]["name"]]
            node_id = claim["metadata"]["annotations"][ANNOTATION_NODE_ID]
            arguments = pod["spec"]["containers"][0]["args"]
            assert node_id in arguments
            assert claim["metadata"]["ownerReferences"][0]["name"] == "flights"
        found = await made.kube.get("TabletCluster", "default", "flights")
        assert found is not None
        assert "finalizers" not in found["metadata"]
        assert "annotations" not in found["metadata"]
        assert await made.end(signal.SIGTERM) == 0


async def test_deleted_with_no_operator_there_the_cluster_goes_and_kept_volumes_stay(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.start()
        found = await made.apply("cluster", deletionPolicy="Retain")
        await made.until("the first masters have pods", lambda: masters_started(made))

        async def told() -> bool:
            reasons = {e["reason"] for e in await made.events("TabletCluster")}
            return reasons >= {"ClaimCreated", "PodCreated"}

        await made.until("events say what was made", told)
        await made.end(signal.SIGKILL)
        await made.kube.delete("TabletCluster", "default", "flights", found["metadata"]["uid"], "")

        async def gone() -> bool:
            return not await made.names("Pod") and not await made.names("Service")

        await made.until("pods and services are gone", gone)
        assert await made.names("PersistentVolumeClaim") >= MASTERS
        assert "flights-identity" in await made.names("ConfigMap")


async def test_volumes_are_let_go_of_a_cluster_that_is_being_deleted_and_held_by_a_finalizer(
    tmp_path: Path,
) -> None:
    """It says Retain since a moment ago, and no operator ran then: Kubernetes would delete what belongs to it."""
    async with bench(tmp_path) as made:
        await made.start()
        found = await made.apply("cluster", deletionPolicy="Delete")

        async def claimed() -> bool:
            return await made.names("PersistentVolumeClaim") >= MASTERS

        await made.until("the first masters have claims", claimed)
        await made.end(signal.SIGKILL)
        hold = {"metadata": {"finalizers": ["example.com/hold"]}, "spec": {"deletionPolicy": "Retain"}}
        await made.kube.patch("TabletCluster", "default", "flights", hold)
        await made.kube.delete("TabletCluster", "default", "flights", found["metadata"]["uid"], "")
        pods = await made.names("Pod")
        await made.start()

        async def let_go() -> bool:
            claims = await made.kube.list("PersistentVolumeClaim", "default")
            return not any(c["metadata"].get("ownerReferences") for c in claims)

        await made.until("no claim belongs to it", let_go)
        assert await made.names("Pod") == pods, "nothing new is made"
        await made.kube.patch("TabletCluster", "default", "flights", {"metadata": {"finalizers": None}})

        async def gone() -> bool:
            return not await made.names("TabletCluster") and not await made.names("Service")

        await made.until("it is gone, and its Services with it", gone)
        assert await claimed()


async def test_pods_that_were_left_to_nobody_go_with_the_cluster_that_was_applied_again(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:
        await made.start()
        found = await made.apply("cluster")
        await made.until("the first masters have pods", lambda: masters_started(made))
        await made.end(signal.SIGKILL)
        body = {"propagationPolicy": "Orphan", "preconditions": {"uid": found["metadata"]["uid"]}}
        path = "/apis/stele.dev/v1alpha1/namespaces/default/tabletclusters/flights"
        await made.kube._request("DELETE", path, body=body)
        again = await made.apply("cluster")
        await made.start()

        async def adopted() -> bool:
            kinds = ("Pod", "Service", "PodDisruptionBudget")
            everything = [raw for kind in kinds for raw in await made.kube.list(kind, "default")]
            owners = [[r["uid"] for r in raw["metadata"].get("ownerReferences") or ()] for raw in everything]
            return len(everything) > 6 and all(uids == [again["metadata"]["uid"]] for uids in owners)

        await made.until("all are the new one's", adopted)
        assert await made.names("Pod") >= MASTERS


async def test_groups_that_wait_for_a_cluster_and_an_operator_that_waits_for_the_lease(
    tmp_path: Path,
) -> None:
    """One operator for all three: none of them needs a pod."""
    async with bench(tmp_path, machines=1) as made:
        await made.start()
        await a_second_operator_waits_for_the_lease(made)
        await a_group_without_its_cluster_is_told_so_and_can_go(made)
        await a_group_deleted_while_its_cluster_is_paused_says_what_it_waits_for_and_retain_lets_it_go(made)


async def a_group_without_its_cluster_is_told_so_and_can_go(made: Bench) -> None:
    group = await made.apply("flights")

    async def told() -> bool:
        return (await made.condition("TabletGroup", "flights", "Ready"))[1] == "ClusterNotFound"

    await made.until("the group is told that there is no cluster", told)
    finalizers = {"metadata": {"finalizers": ["stele.dev/table"]}}
    await made.kube.patch("TabletGroup", "default", "flights", finalizers)
    await made.kube.delete("TabletGroup", "default", "flights", group["metadata"]["uid"], "")

    async def gone() -> bool:
        return not await made.names("TabletGroup")

    await made.until("the group is gone", gone)


async def a_group_deleted_while_its_cluster_is_paused_says_what_it_waits_for_and_retain_lets_it_go(
    made: Bench,
) -> None:
    await made.apply("cluster", paused=True)
    group = await made.apply("flights", deletionPolicy="Delete")
    held = {"metadata": {"finalizers": ["stele.dev/table"]}}  # from before the pause
    await made.kube.patch("TabletGroup", "default", "flights", held)
    await made.kube.delete("TabletGroup", "default", "flights", group["metadata"]["uid"], "")

    async def told() -> bool:
        return (await made.condition("TabletGroup", "flights", "Reconciling"))[1] == "ClusterNotKept"

    await made.until("it says what it waits for", told)
    retain = {"spec": {"deletionPolicy": "Retain"}}
    await made.kube.patch("TabletGroup", "default", "flights", retain)

    async def gone() -> bool:
        return not await made.names("TabletGroup")

    await made.until("the group is gone", gone)


async def a_second_operator_waits_for_the_lease(made: Bench) -> None:
    async def held() -> bool:
        return await made.kube.get("Lease", "default", "stele-operator") is not None

    await made.until("the lease is held", held)
    words = ("--kubeconfig", str(made.local.kubeconfig), "--namespace", "default", "--metrics-port", "0")
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stele_operator", "run", *words, stdout=pipe, stderr=pipe
    )
    try:
        assert other.stderr is not None
        async with asyncio.timeout(120):
            while b"waiting for the lease" not in (line := await other.stderr.readline()):
                assert line, "it ended"
        lease = await made.kube.get("Lease", "default", "stele-operator")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == "operator-under-test"
        assert other.returncode is None
    finally:
        other.kill()
        await other.communicate()


async def test_what_only_the_operator_can_see_is_a_condition_and_an_event(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=3) as made:
        await made.start()
        await made.apply("cluster", zones=["z1", "z7"])

        async def told() -> bool:
            return (await made.condition("TabletCluster", "flights", "Stalled"))[:2] == (
                "True",
                "UnknownZone",
            )

        await made.until("the unknown zone is named", told)
        assert "z7" in (await made.condition("TabletCluster", "flights", "Stalled"))[2]

        async def said() -> bool:
            return "UnknownZone" in {e["reason"] for e in await made.events("TabletCluster")}

        await made.until("an event says so", said)


async def test_a_wrong_kubeconfig_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    no_yaml, no_server = tmp_path / "no-yaml", tmp_path / "no-server"
    no_yaml.write_text("clusters: {")
    no_server.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], "
        "users: [{name: u, user: {}}], clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]}"
    )
    for path, words in (
        (tmp_path / "none", "no such file; pass the right path with --kubeconfig"),
        (no_yaml, "cannot be used"),
        (no_server, "check its server and credentials"),
    ):
        arguments = ("run", "--kubeconfig", str(path), "--metrics-port", "0")
        code, _, errors = await outcome(operator_template(), arguments, dict(os.environ))
        lines = errors.strip().splitlines()
        assert code == 2, lines
        assert len(lines) == 1, lines
        assert words in lines[0]
        assert str(path) in lines[0]


async def test_a_claim_that_lost_its_labels_is_found_by_its_name(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.start()
        await made.apply("cluster")
        await made.until("the first masters have pods", lambda: masters_started(made))
        labels = dict.fromkeys(("stele.dev/cluster", "stele.dev/role"))
        await made.kube.patch(
            "PersistentVolumeClaim", "default", "flights-master-1", {"metadata": {"labels": labels}}
        )

        async def back() -> bool:
            claim = await made.kube.get("PersistentVolumeClaim", "default", "flights-master-1")
            return claim is not None and claim["metadata"]["labels"].get("stele.dev/role") == "master"

        await made.until("it has its labels again", back)


async def test_what_is_to_be_kept_is_looked_at_after_each_write(tmp_path: Path) -> None:
    """As the tests do it that hold a state: no state is too short."""
    async with bench(tmp_path, machines=1) as made:
        with (
            pytest.raises(AssertionError, match=r"not so, by configmaps/x at version .*: no map"),
            made.keep("no map", lambda: not made.local.store.objects(CONFIG_MAP.key)),
        ):
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
            uid = (await made.kube.create("ConfigMap", "default", body))["metadata"]["uid"]
            await made.kube.delete("ConfigMap", "default", "x", uid, "")

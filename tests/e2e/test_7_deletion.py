"""The TabletCluster deleted, one way and the other, with the operator there and with it gone."""

from __future__ import annotations

import pytest

from tests.e2e.bench import CLUSTER, Bench


def delete(bench: Bench, propagation: str) -> None:
    """kubectl delete tabletcluster, and wait until it is gone."""
    bench.custom.delete_namespaced_custom_object(
        *bench.where("TabletCluster"), CLUSTER, propagation_policy=propagation
    )
    bench.until("the TabletCluster is gone", lambda: not bench.names("TabletCluster"))
    bench.until("its pods are gone", lambda: not bench.pods())


def operators(bench: Bench, count: int) -> None:
    """As many operators as this."""
    bench.place.upgrade(f"replicas={count}")
    bench.until(f"{count} operators", lambda: len(bench.operators()) == count)


@pytest.mark.parametrize(("propagation", "there"), [("Background", True), ("Foreground", False)])
def test_retained_volumes_stay_and_are_taken_again(bench: Bench, propagation: str, there: bool) -> None:
    bench.have(fresh=True, policy="Delete" if there else "Retain")
    loaded = bench.program("load")
    for kind in ("TabletGroup", "TabletCluster"):
        bench.patch(kind, {"deletionPolicy": "Retain"})
    bench.until(
        "Retain is in force",
        lambda: bench.kube.status("TabletCluster", CLUSTER).get("deletionPolicy") == "Retain",
    )
    claims = {n: c.metadata.uid for n, c in bench.claims().items()}
    identities = {n: m["nodeUUID"] for n, m in bench.members().items()}
    if not there:
        operators(bench, 0)
    delete(bench, propagation)
    assert {n: c.metadata.uid for n, c in bench.claims().items()} == claims
    if not there:
        operators(bench, 1)
    bench.until(
        "the TabletGroup says that its cluster is gone",
        lambda: bench.condition("TabletGroup", "Ready")["reason"] == "ClusterNotFound",
    )
    bench.apply("cluster", deletionPolicy="Retain")
    bench.until("the same cluster is back", lambda: bench.whole() and bench.ready("TabletGroup"), 240)
    assert {n: m["nodeUUID"] for n, m in bench.members().items()} == identities
    bench.compare(loaded)


@pytest.mark.parametrize(("propagation", "there"), [("Foreground", True), ("Background", False)])
def test_volumes_to_be_deleted_go(bench: Bench, propagation: str, there: bool) -> None:
    bench.have(fresh=True)
    volumes = {c.spec.volume_name for c in bench.claims().values()}
    if not there:
        operators(bench, 0)
    delete(bench, propagation)
    bench.until("the claims are gone", lambda: not bench.claims())
    bench.until(
        "the volumes are gone",
        lambda: not volumes & {v.metadata.name for v in bench.core.list_persistent_volume().items},
    )
    bench.custom.delete_namespaced_custom_object(*bench.where("TabletGroup"), CLUSTER)
    if not there:
        operators(bench, 1)  # the finalizer of the TabletGroup waits for it
    bench.until("the TabletGroup is gone", lambda: not bench.names("TabletGroup"))
    bench.have()
    assert not volumes & {c.spec.volume_name for c in bench.claims().values()}

"""Actions on an API server whose objects changed, went, or were made anew meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele_operator.act import Actor, Outcome
from stele_operator.kube import Conflict, Kube, KubeError
from stele_operator.observe import observe_kubernetes
from stele_operator.plan.actions import (
    Action,
    CreateObject,
    DeleteObject,
    PatchObject,
    RegisterNode,
    ReplaceIdentity,
    SetFinalizers,
)
from stele_operator.plan.formation import replace_identity
from stele_operator.report import Reporter
from tests.operator.cluster import Bench, bench

Json = dict[str, Any]


async def outcome(made: Bench, action: Action) -> Outcome:
    """What became of one action."""
    (found,) = await Actor(made.kube, "default", None).carry_out([action])
    return found


async def at_last(made: Bench, action: Action) -> Outcome:
    """What became of it once nobody changed the object under it, as the controller of budgets does their status."""
    while True:
        found = await outcome(made, action)
        if not found.changed_under:
            return found


async def test_what_is_gone_meanwhile_is_old_news_and_no_failure(tmp_path: Path) -> None:
    """A failure is an event with a warning; that a user deleted something in the middle of a pass is none."""
    async with bench(tmp_path, machines=1) as made:
        for action in (
            PatchObject("it grew", "PersistentVolumeClaim", "none", "u", "1", {"spec": {}}),
            SetFinalizers("let go", "none", "u", "1", ()),
        ):
            found = await outcome(made, action)
            assert found.error and found.changed_under
        gone = DeleteObject("no longer wanted", "PersistentVolumeClaim", "none", "u", "1")
        assert not (await outcome(made, gone)).error


async def test_what_counts_on_a_serial_or_a_registration_is_not_done_without_it(tmp_path: Path) -> None:
    """Else a claim would take a serial that nobody set aside, or a pod start on a node that no master knows."""
    async with bench(tmp_path, machines=1) as made:
        rest = DeleteObject("no longer wanted", "PersistentVolumeClaim", "none", "u", "1")
        actor = Actor(made.kube, "default", None)
        serials = ReplaceIdentity("serials", "ConfigMap", "flights-identity", "", "1", {"data": {}})
        for first in (serials, RegisterNode("part of the cluster", "a" * 32, "node", "flights-node-0")):
            (only,) = await actor.carry_out([first, rest])
            assert only.action is first and only.error
        refused = PatchObject("it grew", "PersistentVolumeClaim", "none", "u", "1", {"spec": {}})
        assert [bool(o.error) for o in await actor.carry_out([refused, rest])] == [True, False]


async def test_an_object_made_anew_under_its_name_is_another_one(tmp_path: Path) -> None:
    """The API server says 422 to a patch with another uid, and 409 to a deletion."""
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        before = {**raw, "metadata": {**raw["metadata"], "uid": "00000099-0000-0000-0000-000000000000"}}
        reporter = Reporter(made.kube, "test")
        assert not await reporter.status("TabletCluster", before, {"replicas": 1}, 100)
        patch = {"metadata": {"uid": before["metadata"]["uid"]}}
        with pytest.raises(Conflict):
            await made.kube.patch("TabletCluster", "default", "flights", patch)
        with pytest.raises(Conflict):
            await made.kube.delete("TabletCluster", "default", "flights", before["metadata"]["uid"], "")
        with pytest.raises(KubeError) as refused:  # what a rule forbids is none of it
            await made.kube.patch(
                "TabletCluster", "default", "flights", {"spec": {"masters": {"replicas": 2}}}
            )
        assert not isinstance(refused.value, Conflict)


async def test_a_kind_that_is_not_served_is_not_an_object_that_is_gone(tmp_path: Path) -> None:
    """Or a TabletCluster would be taken for deleted while its definition, or the API server behind a proxy, is away."""
    async with bench(tmp_path, machines=1) as made:
        assert await made.kube.get("TabletCluster", "default", "flights") is None
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/tabletclusters.stele.dev"
        await made.kube._request("DELETE", path)

        async def unserved() -> bool:
            answer = await made.kube._request(
                "GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            )
            return path.rsplit("/", 1)[-1] not in {d["metadata"]["name"] for d in answer["items"]}

        await made.until("the definition is gone", unserved)
        with pytest.raises(KubeError, match="could not find the requested resource"):
            await made.kube.get("TabletCluster", "default", "flights")
        with pytest.raises(KubeError, match="could not find the requested resource"):
            await made.kube.delete("TabletCluster", "default", "flights", "u", "1")


def budget(*owners: Json, **labels: str) -> Json:
    """A disruption budget."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "flights-nodes", "labels": labels, "ownerReferences": list(owners)},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"stele.dev/cluster": "flights"}}},
    }


async def test_what_exists_and_lost_its_labels_gets_them_back_and_what_is_not_ours_is_told(
    tmp_path: Path,
) -> None:
    """Neither is in any list; taken for made, it would be made again in every pass, and never kept as it should be."""
    labels = {"stele.dev/cluster": "flights", "app.kubernetes.io/managed-by": "stele-operator"}
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        owner = {
            "apiVersion": "stele.dev/v1alpha1",
            "kind": "TabletCluster",
            "name": "flights",
            "uid": raw["metadata"]["uid"],
        }
        create = CreateObject("it is missing", manifest=budget(owner, **labels))
        assert not (await outcome(made, create)).error
        assert not (await outcome(made, create)).error  # by a pass that was cut off
        gone = {"metadata": {"labels": {**dict.fromkeys(labels), "team": "data"}}}
        await made.kube.patch("PodDisruptionBudget", "default", "flights-nodes", gone)
        assert not (await at_last(made, create)).error
        (there,) = await made.kube.list("PodDisruptionBudget", "default", "stele.dev/cluster=flights")
        assert there["metadata"]["labels"] == {**labels, "team": "data"}

        await made.kube.delete(
            "PodDisruptionBudget", "default", "flights-nodes", there["metadata"]["uid"], ""
        )
        await made.kube.create("PodDisruptionBudget", "default", budget())
        found = await outcome(made, create)
        assert "flights-nodes" in found.error and "rename or delete it" in found.error
        assert not found.changed_under


class Interrupted(Kube):
    """A connection on which another operator does its work while the lists are being read."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        found = await super().list(kind, namespace, selector)
        if kind == "PersistentVolumeClaim" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return found


async def test_what_is_planned_on_lists_is_refused_when_another_operator_acted_since(tmp_path: Path) -> None:
    """It set serials aside and made their claims: who has not seen these must not set more aside, or there are twice as
    many nodes."""
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        data = {
            "clusterUUID": "a" * 32,
            "nextMaster": "3",
            "nextNode": "3",
            "firstMasters": "[]",
            "formed": "",
        }
        metadata = {"name": "flights-identity"}
        await made.kube.create(
            "ConfigMap",
            "default",
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
        )

        async def another() -> None:
            await made.kube.patch("ConfigMap", "default", "flights-identity", {"data": {"nextNode": "5"}})

        kube = Interrupted(made.kube.settings)
        kube.meanwhile = another
        try:
            seen, _ = await observe_kubernetes(kube, raw, "image")
        finally:
            await kube.close()
        assert seen.identity is not None
        aside = replace(
            seen.identity, next_serial={"master": 3, "node": seen.identity.next_serial["node"] + 2}
        )
        found = await outcome(made, replace_identity(seen, aside, "serials for 2 nodes"))
        assert found.changed_under

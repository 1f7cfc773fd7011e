"""Actions on an API server whose objects changed, went, or were made anew meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from stele.model.errors import Code, Retryable
from stele.model.ids import ClusterId, NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.identity import Identity as RpcIdentity
from stele.rpc.identity import PeerBook
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer, add_MasterServiceServicer_to_server
from stele.rpc.server import bind, make_server
from stele_operator.act import ROLL_WITHIN_S, Actor, Outcome
from stele_operator.api.group import TabletGroupSpec
from stele_operator.backoff import Backoff
from stele_operator.kube import Conflict, Kube, KubeError
from stele_operator.masters import MasterLink
from stele_operator.observe import observe_kubernetes
from stele_operator.plan.actions import (
    Action,
    CreateClaim,
    CreateObject,
    CreatePod,
    CreateTable,
    DeleteClaim,
    DeleteObject,
    DeletePod,
    DeleteTable,
    PatchObject,
    RegisterNode,
    ReplaceIdentity,
    RollPod,
    SetFinalizers,
)
from stele_operator.plan.formation import replace_identity
from stele_operator.plan.observation import Identity
from stele_operator.plan.order import Held
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


def claim(name: str) -> Json:
    """A claim of a node, as the plan makes it."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    labels = {"stele.dev/cluster": "flights", "stele.dev/role": "node"}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def pod(name: str) -> Json:
    """A pod of a node, of which nothing runs."""
    labels = {"stele.dev/cluster": "flights", "stele.dev/role": "node"}
    spec = {"containers": [{"name": "stele", "image": "none"}], "nodeSelector": {"no": "machine"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def test_what_counts_on_a_serial_or_a_registration_is_not_done_without_it(tmp_path: Path) -> None:
    """Else a claim would take a serial that nobody set aside, or a pod start on a node that no master knows."""
    async with bench(tmp_path, machines=1) as made:
        actor = Actor(made.kube, "default", None)
        serials = ReplaceIdentity(
            "serials",
            "ConfigMap",
            "flights-identity",
            "",
            "1",
            {"data": {}},
            Identity("1", "a" * 32, "", {"master": 0, "node": 0}, ()),
        )
        register = RegisterNode("part of the cluster", "a" * 32, "node", "flights-node-0")
        for first, rest in (
            (serials, CreateClaim("a new node", claim("flights-node-0"))),
            (register, CreatePod("a new node", pod("flights-node-0"))),
        ):
            failed, held = await actor.carry_out([first, rest])
            assert failed.error and not failed.held
            assert held.held and failed.error in held.error and held.error.startswith("waits until ")
            assert not await made.names(rest.kind)


class Silent:
    """A link to masters that do not answer any more."""

    async def register(self, node_id: str, role: str, name: str) -> None:
        raise Retryable("no master leads", code=Code.UNAVAILABLE)


async def test_no_pod_is_rolled_by_what_was_seen_long_ago(tmp_path: Path) -> None:
    """An action before it took long, or masters have stopped to answer: by now another member may be away."""
    async with bench(tmp_path, machines=1) as made:
        there = await made.kube.create("Pod", "default", pod("flights-node-1"))
        roll = RollPod("its image", "Pod", "flights-node-1", there["metadata"]["uid"], "")
        clock = iter((0.0, ROLL_WITHIN_S + 1))
        (late,) = await Actor(made.kube, "default", None, now_s=lambda: next(clock)).carry_out([roll])
        register = RegisterNode("part of the cluster", "a" * 32, "node", "flights-node-0")
        link = cast(MasterLink, Silent())
        failed, held = await Actor(made.kube, "default", link).carry_out([register, roll])
        assert failed.unanswered and not failed.held
        for found in (late, held):
            assert found.held and found.changed_under and found.error
        assert await made.names("Pod") == {"flights-node-1"}
        assert not (await outcome(made, roll)).error


class Stopped(MasterServiceServicer):
    """A master whose process stands still: it takes calls, and answers none."""

    def __init__(self) -> None:
        self.calls = 0

    async def RegisterNode(self, request: Any, context: Any) -> Any:
        self.calls += 1
        await asyncio.Event().wait()


async def test_masters_that_stand_still_are_asked_once_in_a_pass(tmp_path: Path) -> None:
    """Each further order waited for them as long as the first one: minutes in which the pass did nothing else."""
    cluster_id, stopped = "c" * 32, Stopped()
    server = make_server(RpcIdentity(ClusterId(cluster_id), NodeId("d" * 32), 1), PeerBook(), ByteBudget())
    add_MasterServiceServicer_to_server(stopped, server)
    port = await bind(server, "127.0.0.1:0")
    await server.start()
    link = MasterLink(cluster_id, "test")
    link.learn([f"127.0.0.1:{port}"])
    link._masters._timeout_s, link._masters._rounds = 0.5, 1
    try:
        async with bench(tmp_path, machines=1) as made:
            many = [RegisterNode("part of the cluster", f"{n:032x}", "node", f"n{n}") for n in range(1, 9)]
            roll = RollPod("its image", "Pod", "flights-node-1", "u", "")
            outcomes = await Actor(made.kube, "default", link).carry_out([*many, roll])
            assert outcomes[0].unanswered and not outcomes[0].held
            assert all(found.held for found in outcomes[1:])
            assert stopped.calls == 1
    finally:
        await link._pool.close()
        await server.stop(0)


async def test_a_refused_registration_holds_up_neither_volumes_nor_other_pods(tmp_path: Path) -> None:
    """Masters whose disks are full refuse it, and the list ended there: their volumes did not grow."""
    async with bench(tmp_path, machines=1) as made:
        there = await made.kube.create("PersistentVolumeClaim", "default", claim("flights-master-0"))
        dead = await made.kube.create("Pod", "default", pod("flights-node-1"))
        seen = (there["metadata"]["uid"], "")
        annotate = {"metadata": {"annotations": {"grown": "yes"}}}
        version = there["metadata"]["resourceVersion"]
        actions = [
            RegisterNode("part of the cluster", "a" * 32, "node", "flights-node-0"),
            PatchObject("its size", "PersistentVolumeClaim", "flights-master-0", seen[0], version, annotate),
            CreatePod("a new node", pod("flights-node-0")),
            DeletePod("it has ended", "Pod", "flights-node-1", dead["metadata"]["uid"], "", force=True),
            RegisterNode("part of the cluster", "b" * 32, "node", "flights-node-2"),
            CreatePod("back on its volume", pod("flights-node-3")),
        ]
        outcomes = await Actor(made.kube, "default", None).carry_out(actions)
        assert [bool(x.error) for x in outcomes] == [True, False, True, False, True, False]
        assert [x.held for x in outcomes] == [False, False, True, False, False, False]
        (grown,) = await made.kube.list("PersistentVolumeClaim", "default")
        assert grown["metadata"]["annotations"]["grown"] == "yes"
        assert await made.names("Pod") == {"flights-node-3"}


DISK_FULL = Outcome(
    RegisterNode("it is part", "a" * 32, "node", "n"), "DISK_FULL: the masters' disks are full"
)
SILENCE = replace(DISK_FULL, error="UNAVAILABLE: no master answers", unanswered=True)
SPEC = TabletGroupSpec(
    clusterRef={"name": "flights"}, columns=[{"name": "id", "type": "int64"}], primaryKey=["id"]
)
DROP = DeleteTable("its TabletGroup is gone", "t", "b" * 32, "t")
MAKE = CreateTable("it is asked for", "t", "b" * 32, "t", SPEC)
HOLDS = [
    # what failed, and how; what comes after it; whether that waits
    (DISK_FULL, DISK_FULL.action, False),
    (DISK_FULL, DROP, False),
    (SILENCE, replace(DISK_FULL.action, node_id="c" * 32), True),
    (SILENCE, DROP, True),
    (SILENCE, MAKE, True),
    (Outcome(SetFinalizers("Delete", "t", "u", "1", ()), "no"), MAKE, True),
    (Outcome(SetFinalizers("Delete", "other", "u", "1", ()), "no"), MAKE, False),
    (Outcome(DeletePod("stranded", "Pod", "n", "u", "1"), "no"), DeleteClaim("it", "PersistentVolumeClaim", "n", "u", "1"), True),
    (Outcome(DeletePod("stranded", "Pod", "m", "u", "1"), "no"), DeleteClaim("it", "PersistentVolumeClaim", "n", "u", "1"), False),
]  # fmt: skip


@pytest.mark.parametrize(("failed", "after", "waits"), HOLDS)
def test_what_an_action_counts_on(failed: Outcome, after: Action, waits: bool) -> None:
    """A volume goes after its pod, a table comes after its finalizer; masters that answer nobody are asked once in a pass,
    and what frees their disks is not held up by what these refuse."""
    held = Held()
    held.failed(failed.action, failed)
    assert bool(held.why(after)) is waits


def test_what_is_held_up_holds_up_what_counts_on_it() -> None:
    held = Held()
    held.failed(SILENCE.action, SILENCE)
    second = RegisterNode("part of the cluster", "b" * 32, "node", "flights-node-2")
    held.failed(second, Outcome(second, held.why(second), held=True))
    assert "no master answers" in held.why(CreatePod("a new node", pod("flights-node-2")))


def test_an_action_that_fails_is_tried_again_later_each_time_and_the_others_at_once() -> None:
    action, other = CreatePod("a new node", pod("a")), CreatePod("a new node", pod("b"))
    backoff, tried = Backoff(), []
    for now_s in range(1_000, 1_060):
        early = backoff.early(action, now_s)
        assert backoff.early(other, now_s) is None
        if early is None:
            tried.append(now_s - 1_000)
        outcome = early or Outcome(action, "no such priority class", refused=True)
        assert outcome.error == "no such priority class" and outcome.refused
        backoff.learn([outcome, Outcome(other)], now_s)
        backoff.end_pass()
    assert tried == [0, 1, 3, 7, 15, 30, 45]


def test_a_pass_that_acts_twice_forgets_neither_call() -> None:
    """As over a cluster that is being deleted: claims are let go first, and the rest is done once the masters were asked."""
    first, second = CreatePod("a claim is let go", pod("a")), CreatePod("a new node", pod("b"))
    backoff = Backoff()
    tried: dict[str, list[int]] = {"a": [], "b": []}
    for now_s in range(1_000, 1_016):
        for action, name in ((first, "a"), (second, "b")):
            early = backoff.early(action, now_s)
            if early is None:
                tried[name].append(now_s - 1_000)
            backoff.learn([early or Outcome(action, "refused by a webhook")], now_s)
        backoff.end_pass()
    assert tried == {"a": [0, 1, 3, 7, 15], "b": [0, 1, 3, 7, 15]}


def test_what_was_mended_is_not_waited_for() -> None:
    """A changed spec, an action that is no longer planned, old news, and a clock that was set back."""
    action = CreatePod("a new node", pod("a"))
    failed = Outcome(action, "no such priority class", refused=True)

    def after(*passes: list[Outcome], generation: int = 1, now_s: float = 1_010) -> Outcome | None:
        backoff = Backoff()
        for outcomes in passes:
            backoff.of(1)
            backoff.learn(outcomes, 1_010)
            backoff.end_pass()
        backoff.of(generation)
        return backoff.early(action, now_s)

    often = [[failed]] * 9
    assert after(*often) is not None
    assert after(*often, generation=2) is None
    assert after(*often, []) is None
    assert after([replace(failed, changed_under=True)]) is None
    assert after(*often, now_s=5) is None
    assert after(*often, [replace(failed, held=True)]) is not None


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

"""What the operator shows at a glance: its gauges as they are scraped, and the columns of `kubectl get`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stele.driver.executor import Report
from stele.driver.policy import Policy
from stele.driver.progress import Pace
from stele.driver.steps import Blocked, DemotePeer, WaitCopy
from stele.driver.view import ClusterView
from stele.model.ids import NodeId, ReplicaId, TabletId
from stele_operator import metrics
from stele_operator.fleet import Fleet
from stele_operator.heal import Healer
from stele_operator.kube import UNREACHABLE, Kube, KubeError
from stele_operator.plan import Observation, make_plan
from stele_operator.plan.status import cluster_status, group_status
from stele_operator.reconcile import ClusterTask, _measure
from stele_operator.report import Reporter
from tests.operator.cluster import Bench, bench
from tests.operator.worlds import made as made_world

Json = dict[str, Any]
WHERE = ("data", "flights")


def scraped(name: str, namespace: str = WHERE[0]) -> dict[tuple[str, ...], float]:
    """The series of a metric for a cluster, by the labels that are left."""
    text = generate_latest(metrics.registry).decode()
    return {
        tuple(v for k, v in sorted(s.labels.items()) if k not in ("namespace", "cluster")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == name and (s.labels.get("namespace"), s.labels.get("cluster")) == (namespace, WHERE[1])
    }


def report(o: Observation) -> Json:
    """What a pass writes and shows of an observation."""
    plan = make_plan(o)
    status = cluster_status(o, plan, (), "now")
    _measure(o, plan, ())
    metrics.conditions(*WHERE, status["conditions"])
    return status


def test_while_no_master_leads_nothing_is_said_of_tablets_and_a_gauge_says_that_it_is_not_ready() -> None:
    world = made_world()
    try:
        report(world.observe())
        assert scraped("stele_operator_tablets") == {
            ("healthy",): 4,
            ("under_replicated",): 0,
            ("unavailable",): 0,
        }
        ready = {k: v for k, v in scraped("stele_operator_condition").items() if "Ready" in k}
        assert ready == {("Writable", "Ready"): 1}
        silent = replace(world.observe(), catalog=None, catalog_problem="10.0.0.1:7051: no answer")
        conditions = {c["type"]: c for c in report(silent)["conditions"]}
        assert scraped("stele_operator_tablets") == {}
        found = scraped("stele_operator_condition")
        assert {k: v for k, v in found.items() if "Ready" in k} == {("MastersUnavailable", "Ready"): 0}
        assert len(found) == len(conditions)
        waits = conditions["Reconciling"]
        assert (waits["status"], waits["reason"]) == ("False", "Waiting")
        assert "no master leads" in waits["message"]
    finally:
        metrics.forget(*WHERE)
    assert not scraped("stele_operator_condition")


async def test_a_deleted_cluster_leaves_no_gauges_and_no_tablets_though_a_table_names_it(
    tmp_path: Path,
) -> None:
    gauges = ("members", "stalled", "condition", "heals")
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        group = await made.apply("flights")
        tablets = {"total": 8, "healthy": 8}
        before = {"tableID": "7" * 32, "clusterUUID": "1" * 32, "tablets": tablets, "worst": []}
        await made.kube.patch("TabletGroup", "default", "flights", {"status": before}, "status")
        task = ClusterTask(
            made.kube, Reporter(made.kube, "test"), "default", "flights", "", lambda done: None
        )
        try:
            await task.run_pass()
            assert all(scraped(f"stele_operator_{name}", "default") for name in gauges)
            await made.kube.delete("TabletCluster", "default", "flights", raw["metadata"]["uid"], "")
            assert await task.run_pass() is not None  # the TabletGroup is still told what it waits for
            assert not any(scraped(f"stele_operator_{name}", "default") for name in gauges)
        finally:
            metrics.forget("default", "flights")
        found = await made.kube.get("TabletGroup", "default", "flights")
        assert found is not None and found["metadata"]["uid"] == group["metadata"]["uid"]
        assert sorted(found["status"]) == ["clusterUUID", "conditions", "observedGeneration", "tableID"]
        assert found["status"]["tableID"] == "7" * 32


def test_waiting_is_no_step_and_what_is_blocked_is_counted_apart() -> None:
    healer, pace, tablet = Healer(), Pace(), TabletId("7" * 32)
    steps = (
        Blocked(tablet, 7, "no machine of its own is free", "NoTarget"),
        WaitCopy(TabletId("8" * 32), 7, "bytes come", ReplicaId(4), NodeId("b" * 32), 10, 20, True),
        DemotePeer(TabletId("9" * 32), 7, "its node is silent", ReplicaId(3), NodeId("a" * 32)),
    )

    def counted() -> Sequence[float]:
        titles = (step.title for step in steps)
        return [metrics.STEPS.labels(title, "done")._value.get() for title in titles]

    before = counted()
    records = tuple(pace.record(step, "t", 0) for step in steps)
    healer._take(Report(ClusterView((), ()), (), records), Policy(), {})
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [0, 0, 1]
    o = made_world().observe()
    try:
        _measure(o, make_plan(o), records)
        assert scraped("stele_operator_heals") == {("blocked",): 1, ("under_way",): 2}
    finally:
        metrics.forget(*WHERE)


async def columns(made: Bench, plural: str) -> dict[str, str]:
    """What `kubectl get` shows of the one object of a kind."""
    table = "application/json;as=Table;v=v1;g=meta.k8s.io"
    url = f"{made.local.url}/apis/stele.dev/v1alpha1/namespaces/default/{plural}"
    headers = {"Accept": table, "Authorization": f"Bearer {made.local.token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        body = await answer.json()
    shown = [(n, c["name"]) for n, c in enumerate(body["columnDefinitions"]) if not c.get("priority")]
    (row,) = body["rows"]
    return {name: str(row["cells"][n]) for n, name in shown}


async def test_an_operator_that_has_nothing_to_look_after_is_not_taken_for_one_that_stands(
    tmp_path: Path,
) -> None:
    """And one that never reaches the API server is: it makes no pass, and its gauge stays at 0."""
    metrics.LAST_PASS.set(0)
    async with bench(tmp_path, machines=1) as made:
        away = Kube(made.kube.settings)
        away.list = _unreachable  # type: ignore[method-assign, assignment]
        for kube, says_so in ((away, False), (made.kube, True)):
            fleet = Fleet(kube, Reporter(kube, "test"), ("default",), "image")
            await fleet.sweep()
            await fleet.close()
            seen = metrics.registry.get_sample_value("stele_operator_last_pass_timestamp_seconds")
            assert bool(seen) is says_so
        await away.close()


async def _unreachable(*args: Any) -> None:
    raise KubeError(0, UNREACHABLE, "nobody answers")


async def test_what_waits_for_a_human_has_a_column(tmp_path: Path) -> None:
    """All volumes are about to go with their pods, and all was True, Writable, Healthy."""
    world = made_world()
    for claim in world.of("PersistentVolumeClaim"):
        claim["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    o = world.observe()
    plan = make_plan(o)
    async with bench(tmp_path, machines=1) as made:
        for kind, name, status in (
            ("TabletCluster", "cluster", cluster_status(o, plan, (), "2026-11-23T00:00:00Z")),
            ("TabletGroup", "flights", group_status(o, plan, o.groups[0], "2026-11-23T00:00:00Z")),
        ):
            await made.apply(name)
            write = partial(made.kube.patch, kind, "default", "flights")
            await write({"status": status}, "status")
        cluster, group = await columns(made, "tabletclusters"), await columns(made, "tabletgroups")
    assert (cluster["Ready"], cluster["Degraded"], cluster["Stalled"]) == ("True", "Healthy", "ClaimsGoing")
    assert (group["Ready"], group["Degraded"], group["Stalled"]) == ("True", "Healthy", "NotStalled")


def test_backups_have_series_while_they_are_there() -> None:
    """A failed night must be able to wake somebody, and a resource that is gone must not."""

    def found(name: str) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
        samples = [s for family in families for s in family.samples if s.name == name]
        return {
            tuple(v for k, v in sorted(s.labels.items()) if k != "namespace"): s.value
            for s in samples
            if s.labels["namespace"] == "backed-up"
        }

    def status(ready: str, reason: str, **more: Any) -> Json:
        return {"conditions": [{"type": "Ready", "status": ready, "reason": reason}], **more}

    passed = {"drill": {"lastPassTime": "2026-01-02T00:00:00Z"}, "lastSuccessTime": "2026-01-01T00:00:00Z"}
    nightly = ("TabletBackupSchedule", "nightly")
    try:
        metrics.backups(
            "backed-up", [(*nightly, status("True", "Complete", **passed)), ("TabletBackup", "one", {})]
        )
        condition = "stele_operator_backup_condition"
        assert found(condition) == {("TabletBackupSchedule", "nightly", "Complete", "Ready"): 1}
        assert found("stele_operator_last_backup_timestamp_seconds") == {("nightly",): 1_767_225_600}
        assert found("stele_operator_last_drill_timestamp_seconds") == {("nightly",): 1_767_312_000}
        metrics.backups("backed-up", [(*nightly, status("False", "BackupFailed"))])
        assert found(condition) == {("TabletBackupSchedule", "nightly", "BackupFailed", "Ready"): 0}
        assert not found("stele_operator_last_drill_timestamp_seconds")
    finally:
        metrics.backups("backed-up", ())
    assert not found(condition)

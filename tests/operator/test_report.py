"""Statuses and events as written to an API server, and the sweep that tells a dead watch from a quiet one."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration

from stele.driver.progress import Pace
from stele.driver.steps import WaitCopy
from stele.driver.view import ClusterView
from stele.model.ids import NodeId, ReplicaId, TabletId
from stele_operator import metrics, reconcile
from stele_operator.api.definitions import definitions
from stele_operator.fleet import STUCK_S, WATCH_LAG_MAX_S, Fleet
from stele_operator.kube import Kube, KubeError
from stele_operator.plan import Observation, Plan, make_plan, naming
from stele_operator.plan.cluster_plan import BUSY_S
from stele_operator.plan.observation import Catalog
from stele_operator.plan.status import cluster_status, healing_status
from stele_operator.reconcile import ClusterTask
from stele_operator.report import PROGRESS_INTERVAL_S, Reporter, difference, without_progress
from tests.operator.cluster import Bench, bench
from tests.operator.world_kube import merged
from tests.operator.worlds import made as made_world
from tests.operator.worlds import node_of

Json = dict[str, Any]

CASES = [
    ({}, {}),
    ({"a": 1}, {"a": 1, "b": {"c": [1]}}),
    ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 3}}),
    ({"a": [1, 2], "b": {"c": 1}}, {"a": [2], "b": 7}),
    ({"a": {"b": {"c": 1}}}, {"a": {"b": {}}}),
]


@pytest.mark.parametrize(("there", "wanted"), CASES)
def test_a_difference_merged_gives_what_was_wanted(there: Json, wanted: Json) -> None:
    patch = difference(there, wanted)
    assert (patch is None) == (there == wanted)
    assert merged(copy.deepcopy(there), patch or {}) == wanted


def status(done: int, step: str = "Copying") -> Json:
    """A status with one copy under way."""
    return {
        "replicas": 1,
        "healing": {"active": [{"tablet": "t", "step": step, "bytesDone": done}], "total": 1},
    }


def test_bytes_alone_are_progress() -> None:
    assert without_progress(status(1)) == without_progress(status(2))
    assert without_progress(status(1)) != without_progress(status(1, "Promoting"))


def group(lost: int, message: str = "") -> Json:
    """The status of a table, so many of whose ten tablets lack a voter."""
    text = message or f"{lost} of 10 tablets lack a voter"
    return {
        "tablets": {"total": 10, "healthy": 10 - lost, "underReplicated": lost, "unavailable": 0},
        "worst": [{"tablet": f"{n:032x}", "reason": "VoterLost"} for n in range(lost)],
        "conditions": [{"type": "Degraded", "status": "True" if lost else "False", "message": text}],
    }


def test_how_many_tablets_are_left_is_progress_and_whether_any_is_is_not() -> None:
    """Each table was written for each of its tablets that were healed."""
    assert without_progress(group(3)) == without_progress(group(2))
    assert without_progress(group(1)) != without_progress(group(0))
    one, other = group(1, "flights-node-3 is silent"), group(1, "flights-node-4 is silent")
    assert without_progress(one) != without_progress(other)
    larger = {**group(3), "tablets": {**group(3)["tablets"], "total": 11}}
    assert without_progress(larger) != without_progress(group(3))


async def test_of_heals_that_are_too_many_to_list_the_list_is_written_now_and_then(tmp_path: Path) -> None:
    """1,500 tablets are healed in hundreds of rounds, and each listed others."""
    many = [{"active": [{"tablet": f"{n}", "step": "Copying"}], "total": 30 - n} for n in range(3)]
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster")
        reporter = Reporter(made.kube, "test")

        async def written(healing: Json) -> bool:
            await reporter.healing(raw, healing)
            there = await made.kube.get("TabletCluster", "default", "flights")
            assert there is not None
            return bool(there["status"]["healing"] == healing)

        assert [await written(h) for h in many] == [True, False, False]
        mark, then_s = reporter._healing[raw["metadata"]["uid"]]
        reporter._healing[raw["metadata"]["uid"]] = mark, then_s - 2 * PROGRESS_INTERVAL_S
        assert await written(many[1]) and not await written(many[2])
        few = {"active": [{"tablet": "9", "step": "Removing"}], "total": 1}
        assert await written(few) and await written({"active": [], "total": 0})


async def test_a_status_is_written_when_it_says_something_new(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        await made.apply("cluster")
        reporter = Reporter(made.kube, "test")
        written = []
        moments = (
            (100, 0, "Copying"),
            (101, 0, "Copying"),
            (102, 5, "Copying"),
            (103, 6, "Promoting"),
            (114, 9, "Promoting"),
            (130, 9, "Promoting"),
            (-50, 11, "Promoting"),  # the clock was put right
        )
        for now_s, done, step in moments:
            raw = await made.kube.get("TabletCluster", "default", "flights")
            assert raw is not None
            written.append(await reporter.status("TabletCluster", raw, status(done, step), now_s))
        assert written == [True, False, False, True, True, False, True]
        raw = await made.kube.get("TabletCluster", "default", "flights")
        assert raw is not None
        assert raw["status"] == status(11, "Promoting")


async def test_an_event_that_repeats_is_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster")
        for now_s in (0, 30, 61):
            await Reporter(made.kube, "test").event("TabletCluster", raw, "Why", "because", now_s)
        reporter = Reporter(made.kube, "test")
        for now_s in (100, 130, 161):
            await reporter.event("TabletCluster", raw, "Why", "because", now_s)
        (event,) = await made.events("TabletCluster")
        assert (event["reason"], event["message"], event["count"]) == ("Why", "because", 5)
        await reporter.event("TabletCluster", raw, "Why", "because", -3600)  # the clock was put right
        (event,) = await made.events("TabletCluster")
        assert event["count"] == 6


async def test_an_event_about_the_same_is_one_whatever_it_says(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster")
        reporter = Reporter(made.kube, "test")
        for now_s, text, about in (
            (0, "node-7 is refused, used: 8", "node"),
            (1, "node-8 is refused, used: 8", "node"),
            (2, "master-3 is refused", "master"),
            (61, "node-9 is refused, used: 9", "node"),
        ):
            await reporter.event("TabletCluster", raw, "CreateClaimFailed", text, now_s, True, about)
        found = await made.events("TabletCluster")
        assert sorted((e["message"], e["count"]) for e in found) == [
            ("master-3 is refused", 1),
            ("node-9 is refused, used: 9", 2),
        ]


async def test_a_watch_that_owes_a_change_is_dead_and_a_quiet_one_is_not(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        now = [1000.0]
        fleet = Fleet(made.kube, Reporter(made.kube, "test"), ("default",), "image", clock=lambda: now[0])
        try:
            now[0] += 2 * STUCK_S
            assert not fleet.not_live()  # stands by: nothing is owed
            fleet.lead()
            raw = await made.apply("cluster", paused=True)
            fleet.saw(raw, deleted=False)
            for _ in range(10):  # nothing changes: quiet
                await _settle(made, fleet)
                now[0] += 30
                assert not fleet.not_live()
            await made.kube.patch(
                "TabletCluster", "default", "flights", {"metadata": {"labels": {"new": "one"}}}
            )
            await fleet.sweep()
            assert not fleet.not_live()
            now[0] += WATCH_LAG_MAX_S + 1
            await fleet.sweep()
            assert "watch is dead" in fleet.not_live()
            await _settle(made, fleet)
            assert not fleet.not_live()
            now[0] += STUCK_S + 1
            assert "no list" in fleet.not_live()
        finally:
            await fleet.close()


async def test_what_only_the_status_says_wakes_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass would be the cause of the next one."""
    kube = Kube(Configuration())
    fleet, woken = Fleet(kube, Reporter(kube, "test"), ("default",), "image"), list[str]()
    monkeypatch.setattr(fleet, "wake", lambda namespace, name: woken.append(name))
    metadata: Json = {"name": "flights", "namespace": "default", "uid": "u", "generation": 1}
    changes: tuple[Json, ...] = (
        {"resourceVersion": "1"},
        {"resourceVersion": "2"},  # our own write
        {"resourceVersion": "3", "managedFields": [{"manager": "stele-operator"}]},
        {"resourceVersion": "4", "generation": 2},
        {"resourceVersion": "5", "generation": 2},
        {"resourceVersion": "6", "generation": 2, "deletionTimestamp": "now"},
    )
    wakes = []
    for change in changes:
        fleet.saw({"kind": "TabletCluster", "metadata": {**metadata, **change}}, deleted=False)
        wakes.append(len(woken))
    await kube.close()
    assert wakes == [1, 1, 1, 2, 2, 3]


async def _settle(made: Bench, fleet: Fleet) -> None:
    """The watch brings the newest, and a pass and a sweep end. Tried again, as the pass writes a status."""
    for _ in range(20):
        raw = await made.kube.get("TabletCluster", "default", "flights")
        assert raw is not None
        fleet.saw(raw, deleted=False)
        fleet.note_pass()
        await fleet.sweep()
        again = await made.kube.get("TabletCluster", "default", "flights")
        if again == raw:
            return


class Slow(Kube):
    """A connection over which the list of TabletGroups takes long enough for something else to happen."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        found = await super().list(kind, namespace, selector)
        if kind == "TabletGroup" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return found


async def test_a_cluster_made_again_as_its_task_ends_is_not_left_to_the_next_sweep(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        kube = Slow(made.kube.settings)
        fleet = Fleet(kube, Reporter(kube, "test"), ("default",), "image")

        async def applied() -> None:
            raw = await made.apply("cluster", paused=True)
            fleet.saw(raw, deleted=False)

        kube.meanwhile = applied
        try:
            fleet.wake("default", "flights")

            async def looked_after() -> bool:
                return (await made.condition("TabletCluster", "flights", "Reconciling"))[1] == "Paused"

            await made.until("it is looked after", looked_after)
        finally:
            await fleet.close()
            await kube.close()


async def test_why_passes_fail_is_told_where_users_look(tmp_path: Path) -> None:
    """Its status stays as it was last written; the log is the operator's, who uses the cluster may not see it."""
    async with bench(tmp_path, machines=1) as made:
        await made.apply("cluster")
        broken = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "flights-identity"},
            "data": {"formed": "?"},
        }
        await made.kube.create("ConfigMap", "default", broken)
        now = [1000.0]
        fleet = Fleet(made.kube, Reporter(made.kube, "test"), ("default",), "image", clock=lambda: now[0])
        fleet.lead()
        try:
            fleet.wake("default", "flights")

            async def told() -> bool:
                events = await made.events("TabletCluster")
                return any(e["reason"] == "PassFailed" and "flights-identity" in e["message"] for e in events)

            await made.until("an event says why", told)

            # To be started again, and in the end with ever longer waits, would mend nothing.
            now[0] += STUCK_S + 1
            await fleet.sweep()
            fleet.wake("default", "flights")

            async def lives() -> bool:
                return not fleet.not_live()

            await made.until("it counts as alive", lives)
        finally:
            await fleet.close()


class Hooked(Kube):
    """A connection to an API server whose admission webhook for statuses went down with its machine."""

    async def patch(self, kind: str, namespace: str, name: str, patch: Json, sub: str = "") -> Json:
        if sub == "status":
            raise KubeError(500, "InternalError", 'failed calling webhook "validate.example.com"')
        return await super().patch(kind, namespace, name, patch, sub)


class Healing(ClusterTask):
    """A task that counts how often it came to heal."""

    healed = 0

    async def _heal(self, raw: Json, view: ClusterView | None, plan: Plan) -> None:
        self.healed += 1
        await super()._heal(raw, view, plan)


class Hearing(Healing):
    """One whose leading master says whether it has heard all nodes."""

    settled = False

    async def _with_masters(self, o: Observation) -> Observation:
        return replace(o, catalog=Catalog(ClusterView((), (), settled=self.settled)))


async def test_a_new_leader_master_is_given_time_to_hear_from_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says before looks like a disaster; one that never hears from all must not stop the operator."""
    monkeypatch.setattr(reconcile, "_SETTLE_MAX", 3)
    async with bench(tmp_path, machines=1) as made:
        task = Hearing(made.kube, Reporter(made.kube, "test"), "default", "flights", "", lambda done: None)
        await made.apply("cluster", paused=True)
        try:
            for healed in (0, 2):
                for _ in range(3):
                    assert await task.run_pass() == reconcile._SETTLE_S
                assert task.healed == healed
                status, _, _ = await made.condition("TabletCluster", "flights", "Ready")
                assert bool(status) == (healed > 0)
                await task.run_pass()
                assert task.healed == healed + 1
                task.settled = True
                await task.run_pass()
                assert task.healed == healed + 2
                task.settled = False
        finally:
            metrics.forget("default", "flights")


async def test_a_status_that_is_refused_is_told_and_healing_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        kube = Hooked(made.kube.settings)
        task = Healing(kube, Reporter(kube, "test"), "default", "flights", "", lambda done: None)
        await made.apply("cluster", paused=True)
        try:
            assert await task.run_pass() == BUSY_S
            assert task.healed == 1
            (told,) = [e for e in await made.events("TabletCluster") if e["reason"] == "StatusRefused"]
            assert "failed calling webhook" in told["message"]
        finally:
            await kube.close()


async def test_each_member_that_is_lost_is_told_not_only_the_first(tmp_path: Path) -> None:
    """And why, again once that is another thing: it is what stays of it when the member is replaced."""
    world = made_world()
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        task = ClusterTask(
            made.kube, Reporter(made.kube, "test"), "default", "flights", "", lambda done: None
        )
        lost = []
        for machine in ("n1", "n4"):
            lost.append(node_of(world, machine))
            world.kill(machine)
            for _ in range(40):
                world.step()
            for _ in range(2):  # the same again is no news
                observed = world.observe()
                await task._tell_findings(raw, observed, make_plan(observed))
            told = [e["message"] for e in await made.events("TabletCluster") if e["reason"] == "NodeLost"]
            assert sorted(message.split()[0] for message in told) == sorted(lost)
        world.machines = [replace(m, ready=True) for m in world.machines]
        pod = world.objects["Pod", lost[0]]
        ended = {"exitCode": naming.EXIT_VOLUME_EMPTY, "message": "nothing there"}
        status = {"name": "stele", "state": {"terminated": ended}}
        pod["status"] |= {"containerStatuses": [status]}
        observed = world.observe()
        await task._tell_findings(raw, observed, make_plan(observed))
        told = [e["message"] for e in await made.events("TabletCluster") if e["reason"] == "NodeLost"]
        assert [m for m in told if "VolumeEmpty" in m and "nothing there" in m and lost[0] in m]


def test_a_copy_tells_how_long_it_takes_still() -> None:
    pace = Pace()

    def told(done: int, now_ms: int) -> Json:
        step = WaitCopy(
            TabletId("a" * 32), 7, "bytes have arrived", ReplicaId(4), NodeId("b" * 32), done, 100, False
        )
        (heal,) = healing_status([pace.record(step, "events", now_ms)])["active"]
        return {key: heal.get(key) for key in ("bytesDone", "bytesTotal", "etaSeconds")}

    assert told(10, 1_000) == {"bytesDone": 10, "bytesTotal": 100, "etaSeconds": None}, "no pace is known yet"
    assert told(40, 4_000) == {"bytesDone": 40, "bytesTotal": 100, "etaSeconds": 6}
    pace.keep(set())
    assert told(50, 5_000)["etaSeconds"] is None


def test_each_tablet_of_a_heal_has_the_heals_name() -> None:
    """As its events and the logs of nodes have it: a user finds from the status what nodes did."""
    step = WaitCopy(
        TabletId("a" * 32),
        7,
        "bytes have arrived",
        ReplicaId(4),
        NodeId("b" * 32),
        1,
        9,
        False,
        cause="heal/7f3a91c2-12",
    )
    (heal,) = healing_status([Pace().record(step, "events", 0)])["active"]
    assert heal["cause"] == "heal/7f3a91c2-12"
    (crd,) = [d for d in definitions().values() if d["spec"]["names"]["kind"] == "TabletCluster"]
    (version,) = crd["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    shown = status["healing"]["properties"]["active"]["items"]["properties"]
    assert set(heal) <= set(shown), "the API server drops what the definition lacks"
    assert "cause" not in healing_status([Pace().record(replace(step, cause=""), "events", 0)])["active"][0]


async def test_a_disk_without_space_is_told_until_there_is_some(tmp_path: Path) -> None:
    """Leaders go elsewhere, so tablets look well, and the next election brings one back: somebody has to be told."""
    world = made_world()
    name = node_of(world, "n2")
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    async with bench(tmp_path, machines=1) as made:
        raw = await made.apply("cluster", paused=True)
        task = ClusterTask(
            made.kube, Reporter(made.kube, "test"), "default", "flights", "", lambda done: None
        )
        told = []
        for low in (False, True, True, False):
            world.nodes[node_id] = replace(world.nodes[node_id], disk_low=low)
            world.step()
            observed = world.observe()
            plan = make_plan(observed)
            await task._tell_findings(raw, observed, plan)
            status = cluster_status(observed, plan, (), "2026-01-01T00:00:00Z")
            (degraded,) = [c for c in status["conditions"] if c["type"] == "Degraded"]
            told.append((degraded["status"], degraded["reason"]))
            if low:
                assert f"{name} refuses writes" in degraded["message"]
                assert "nodes.storage.size (now 10Gi)" in degraded["message"]
        assert told == [
            ("False", "Healthy"),
            ("True", "DiskFull"),
            ("True", "DiskFull"),
            ("False", "Healthy"),
        ]
        (event,) = [e for e in await made.events("TabletCluster") if e["reason"] == "DiskFull"]
        assert (event["type"], event["count"]) == ("Warning", 1)
        assert event["message"].startswith(f"{name} refuses writes")


def test_what_is_described_stays_short_when_all_disks_are_full() -> None:
    world = made_world()
    world.nodes = {node_id: replace(node, disk_low=True) for node_id, node in world.nodes.items()}
    observed = world.observe()
    plan = make_plan(observed)
    status = cluster_status(observed, plan, (), "2026-01-01T00:00:00Z")
    (degraded,) = [c for c in status["conditions"] if c["type"] == "Degraded"]
    assert len(degraded["message"]) <= 1_000
    assert sorted(f.member for f in plan.findings) == sorted(m.name for m in plan.members)


@pytest.mark.parametrize(("ahead_s", "where"), [(3_600, "ahead of"), (-3, "behind"), (1, "")], ids=str)
def test_a_wrong_clock_is_told_with_the_machine_it_is_on(ahead_s: int, where: str) -> None:
    """Its leaders have gone elsewhere, so tablets look well."""
    world = made_world()
    name = node_of(world, "n2")
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.nodes[node_id] = replace(world.nodes[node_id], clock_ahead_us=ahead_s * 1_000_000)
    observed = world.observe()
    status = cluster_status(observed, make_plan(observed), (), "2026-01-01T00:00:00Z")
    (degraded,) = [c for c in status["conditions"] if c["type"] == "Degraded"]
    if not where:
        assert degraded["status"] == "False"
        return
    assert (degraded["status"], degraded["reason"]) == ("True", "ClockWrong")
    assert f"the clock of {name} is {where} most clocks" in degraded["message"]
    assert "Synchronize the clock of machine n2 with NTP" in degraded["message"]

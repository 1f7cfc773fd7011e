"""Heals as they are told: by node, whatever the number of its tablets; single tablets stand in the status."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from stele.driver.copy_checks import CopyCheck, CopyMade, Voter
from stele.driver.executor import Report
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.progress import Pace
from stele.driver.situation import judge_all
from stele.driver.steps import WAITS, Blocked, DemotePeer, DrainNode, Step, WaitCopy
from stele.driver.view import ClusterView
from stele.model.ids import NodeId, ReplicaId, TabletId
from stele_operator import heal
from stele_operator.heal import Healer
from stele_operator.heals import Heals, News, Work, compared, works_of
from stele_operator.masters import MasterLink
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, Refused, node_name

NAMES = {node_name(n)[:8]: "" for n in range(1, 9)}
B = "b" * 32


class Driver:
    """A driver of the model that tells of its rounds. `late`: rounds in which a refusal stands in for each order."""

    def __init__(self, cluster: Cluster, policy: Policy = POLICY) -> None:
        self.cluster, self.policy = cluster, policy
        self.heals, self.pace = Heals(), Pace()
        self.told: list[News] = []
        self.works: list[Work] = []
        """Those of the last round."""
        self.now_s = 0.0
        self.rounds = 0

    def round(self, seconds: float = 1.0, refusal: str = "") -> bool:
        """One round; whether anything was to be done."""
        view = self._seen()
        steps = plan(view, self.policy)
        records = []
        for step in steps:
            error = refusal or self._give(step)
            error = "" if isinstance(step, WAITS) else error
            records.append(self.pace.record(step, f"t{int(step.tablet_id or '0', 16) % 3}", 0, error))
        report = Report(view, (), tuple(records))
        self.works = works_of(report, self.policy)
        self.told += self.heals.note(self.works, {}, self.now_s)
        self.cluster.advance()
        self.now_s += seconds
        self.rounds += 1
        return bool(steps)

    def until_done(self, seconds: float = 1.0) -> None:
        while self.round(seconds):
            assert self.rounds < 100
        assert self.cluster.healthy()

    def reasons(self) -> Counter[str]:
        return Counter(news.reason for news in self.told)

    def _seen(self) -> ClusterView:
        return self.cluster.view()

    def _give(self, step: Step) -> str:
        try:
            self.cluster.apply(step)
        except Refused as exc:
            return f"refused: {exc}"
        return ""


def machine_lost(tablets: int) -> Driver:
    """A cluster of six nodes, one of which is dead; the driver knows since now."""
    cluster = Cluster(6, 1, tablets, 3)
    cluster.nodes[node_name(1)].alive = False
    cluster.advance()
    return Driver(cluster)


@pytest.mark.parametrize("tablets", [16, 60])
def test_a_machine_lost_is_two_events_however_many_tablets_it_had(tablets: int) -> None:
    """35 of eight tablets made `describe` unreadable; those that waited for their turn were told as well."""
    driver = machine_lost(tablets)
    there = sum(t.config.peer_on(node_name(1)) is not None for t in driver.cluster.tablets.values())
    driver.until_done(seconds=0.1)
    assert driver.reasons() - Counter(Blocked=3) == Counter(HealBegan=1, HealEnded=1)
    began, ended = (n for n in driver.told if n.reason != "Blocked")
    node = f"node {node_name(1)[:8]}"
    cause = f"(heal/{node_name(1)[:8]}-1)"
    assert began.message == f"{node} (its node is silent): {there} tablets of 3 tables {cause}"
    assert ended.message.endswith(cause)
    assert ended.message.startswith(f"{node}: {there} tablets of 3 tables in ")
    steps = ended.message.partition(": ")[2].partition(": ")[2]
    assert f"Removing {there}" in steps and f"Ending {there}" in steps
    assert steps.index("Beginning") < steps.index("Copying") < steps.index("Removing") < steps.index("Ending")
    assert not any(n.warning for n in (began, ended))


def test_a_long_heal_tells_how_far_it_is_as_one_event() -> None:
    driver = machine_lost(60)
    for _ in range(8):
        driver.round(seconds=5.0)
    going = [n for n in driver.told if n.reason == "Healing"]
    assert 2 <= len(going) <= 4 and len({n.about for n in going}) == 1
    assert all(" of 30 tablets of 3 tables are done" in n.message for n in going)
    assert all(re.search(r"are done; [A-Z]\w+ \d+", n.message) for n in going)
    assert "wait for one of the 3 copies" in going[-1].message
    driver.round(seconds=20.0, refusal="CHANGE_IN_PROGRESS: the change at index 9 is not committed yet")
    driver.round(seconds=1.0, refusal="CHANGE_IN_PROGRESS: the change at index 9 is not committed yet")
    assert "were refused a step: " in driver.told[-1].message and "index 9" in driver.told[-1].message


def test_a_node_that_is_back_in_time_ends_its_heal_and_the_next_is_another() -> None:
    driver = machine_lost(16)
    for _ in range(3):
        driver.round()
    driver.cluster.nodes[node_name(1)].alive = True
    driver.until_done()
    ended = driver.told[-1]
    assert ended.reason == "HealEnded" and ("PromotingBack" in ended.message or "Cancelling" in ended.message)
    driver.cluster.nodes[node_name(2)].alive = False
    driver.until_done()
    assert driver.reasons()["HealBegan"] == driver.reasons()["HealEnded"] == 2
    assert driver.told[-1].message.startswith(f"node {node_name(2)[:8]}: ")


def test_two_nodes_are_two_heals() -> None:
    cluster = Cluster(8, 1, 24, 3)
    for n in (1, 5):
        cluster.nodes[node_name(n)].alive = False
    cluster.advance()
    driver = Driver(cluster)
    driver.until_done()
    begun = {n.message.partition(" (")[0] for n in driver.told if n.reason == "HealBegan"}
    assert begun == {f"node {node_name(n)[:8]}" for n in (1, 5)} or len(begun) == 1  # names are eight digits
    assert driver.reasons()["HealBegan"] == driver.reasons()["HealEnded"] == 2


def test_a_driver_that_goes_on_with_anothers_heal_tells_what_is_left_of_it() -> None:
    driver = machine_lost(16)
    for _ in range(4):
        driver.round()
    driver.heals = Heals()
    driver.told.clear()
    driver.cluster.epoch += 1
    driver.until_done()
    assert driver.reasons()["HealBegan"] == driver.reasons()["HealEnded"] == 1
    assert all(
        n.message.endswith(f"(heal/{node_name(1)[:8]}-1)") for n in driver.told if n.reason != "Blocked"
    )


def test_nothing_left_to_do_ends_what_had_begun() -> None:
    driver = machine_lost(16)
    driver.round()
    (ended,) = driver.heals.over({}, 7.0)
    assert ended.reason == "HealEnded" and " in 7 s: Beginning" in ended.message
    assert not driver.heals.over({}, 8.0)


def told(steps: list[Step], names: dict[str, str] | None = None) -> Callable[[Heals], list[News]]:
    """What is told of these steps, as of tablets that nobody else knows."""
    pace = Pace()
    round_ = [Work(pace.record(step, "events", 0)) for step in steps]
    return lambda heals: heals.note(round_, names or {}, 0.0)


def blocked(number: int, reason: str) -> Step:
    return Blocked(TabletId(f"{number:032x}"), 7, reason, "CopyLimit")


def test_a_thousand_tablets_that_wait_for_one_reason_are_one_event() -> None:
    """One each would hold the healing up while they are written, and hide what else there is to read."""
    heals, turn = Heals(), "waits for one of the 4 copies that may run at once"
    waiting = told([*(blocked(n, turn) for n in range(1_000)), blocked(1_000, "no master leads")])
    many, one = waiting(heals)
    assert many.message.startswith("tablet 00000000 of events, tablet 00000000 of events, ")
    assert many.message.endswith(f" and 995 more: {turn}")
    assert one == News("Blocked", "tablet 00000000 of events: no master leads", warning=True)
    assert not waiting(heals)
    heals.over({}, 0.0)
    assert len(waiting(heals)) == 2, "what comes back after all was well is news"


def test_reasons_that_differ_in_replicas_and_seconds_are_one_and_many_reasons_are_a_few_events() -> None:
    heals = Heals()
    reasons = [f"replica {n} on node bbbbbbbb: nothing came for {n} s" for n in range(1, 9)]
    (one,) = told([blocked(n, r) for n, r in enumerate(reasons)], {"bbbbbbbb": "flights-node-1"})(heals)
    assert one.message.endswith("replica 1 on flights-node-1: nothing came for 1 s")
    news = told([blocked(n, f"reason {chr(97 + n)}") for n in range(26)])(heals)
    assert len(news) == 6 and news[-1].message == "21 more reasons: see status.healing"


def test_what_is_about_a_node_or_about_all_is_told_by_its_name() -> None:
    drain = DrainNode(TabletId(""), -1, "declared lost, and silent", NodeId("a" * 32), "")
    unsettled = Blocked(TabletId(""), -1, "the leading master has not heard from all nodes yet", "NotSettled")
    news = told([drain, unsettled], {"a" * 8: "flights-node-1"})(Heals())
    assert [n.message for n in news] == [
        "flights-node-1: declared lost, and silent",
        "all tablets: the leading master has not heard from all nodes yet",
    ]


def test_a_heal_names_the_node_by_its_pod() -> None:
    heals, pace = Heals(), Pace()
    step = DemotePeer(TabletId("1" * 32), 7, "it has FAILED", ReplicaId(3), NodeId(B))
    work = Work(pace.record(step, "events", 0), B, "it has FAILED")
    names = {"bbbbbbbb": "flights-node-1"}
    assert [n.message for n in heals.note([work], names, 0.0)] == [
        "flights-node-1 (it has FAILED): 1 tablet of 1 table"
    ]
    failed = replace(work.record, error="CAS_FAILED: look again")
    assert not heals.note([replace(work, record=failed)], names, 1.0)
    assert [n.message for n in heals.note([], names, 3.0)] == [
        "flights-node-1: 1 tablet of 1 table in 3 s: Demoting 1; 0 bytes copied"
    ]


class Rounds:
    """Stands for the masters and the driver: each round meets the same steps."""

    def __init__(self, *steps: Step) -> None:
        pace = Pace()
        self._records = tuple(pace.record(step, "events", 0) for step in steps)
        self.view = ClusterView((), ())
        self.count = 0
        self.driver = self

    async def run_once(self, policy: Policy) -> Report:
        self.count += 1
        return Report(self.view, (), self._records)

    async def release(self) -> None:
        self.count = 0

    def copies_compared(self) -> list[CopyCheck]:
        return []

    async def rest(self, may_drive: bool) -> bool:
        await self.release()
        return False


@pytest.mark.parametrize("copying", [False, True])
async def test_what_is_blocked_is_looked_at_once_in_a_pass(
    copying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight times, the masters and the nodes were asked for their whole views, with nothing that could have changed."""
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    wait = WaitCopy(TabletId("8" * 32), 7, "bytes come", ReplicaId(4), NodeId(B), 10, 20, True)
    link = Rounds(blocked(1, "no machine of its own is free"), *([wait] if copying else []))
    told = 0

    async def on_round() -> None:
        nonlocal told
        told += 1

    healer = Healer(lambda: 0.0)
    assert await healer.run(cast(MasterLink, link), ClusterView((), ()), Policy(), {}, on_round) == ""
    assert link.count == told == (heal.PASSES_MAX if copying else 1)
    assert [n.reason for n in healer.news()] == ["Blocked"]
    assert len(healer.progress) == 1 + copying


async def test_a_heal_has_ended_when_nothing_is_left_and_not_when_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While no master leads, or too many are lost, nobody knows: what had begun goes on afterwards."""
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    driver = machine_lost(16)
    steps = plan(driver.cluster.view(), POLICY)
    link, healer = Rounds(*steps), Healer(lambda: 5.0)

    async def quiet() -> None: ...

    async def passes(view: ClusterView | None, policy: Policy | None) -> list[str]:
        resting = healer.rests(view, policy)
        await healer.run(cast(MasterLink, link), None if resting else view, policy, {}, quiet)
        return [n.reason for n in healer.news()]

    sick, well = driver.cluster.view(), Cluster(6, 1, 16, 3).view()
    link.view = sick
    assert "HealBegan" in await passes(sick, POLICY)
    assert await passes(None, POLICY) == await passes(sick, None) == []
    assert await passes(replace(well, settled=False), POLICY) == []
    assert await passes(well, POLICY) == ["HealEnded"]
    assert await passes(well, POLICY) == []


async def test_no_round_begins_late_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round after the loss of a node gives thousands of orders, and pods waited for eight of these."""
    monkeypatch.setattr(heal, "_PAUSE_S", 0)
    link = Rounds(WaitCopy(TabletId("8" * 32), 7, "bytes come", ReplicaId(4), NodeId(B), 10, 20, True))
    now_s = 0.0

    async def on_round() -> None:
        nonlocal now_s
        now_s += heal.PASS_S * 0.4

    healer = Healer(lambda: now_s)
    assert await healer.run(cast(MasterLink, link), ClusterView((), ()), Policy(), {}, on_round) == ""
    assert link.count == 3


def test_the_situations_that_a_round_was_planned_on_are_not_worked_out_again() -> None:
    driver = machine_lost(16)
    for _ in range(4):
        driver.round()
    view = driver.cluster.view()
    records = tuple(driver.pace.record(step, "t", 0) for step in plan(view, POLICY))
    anew = works_of(Report(view, (), records), POLICY)
    nobody = dict.fromkeys((r.tablet_id for r in records), judge_all(cluster_at_rest(), POLICY)[0])
    assert any(work.node for work in anew)
    assert (
        works_of(Report(view, (), records, {s.tablet.tablet_id: s for s in judge_all(view, POLICY)}), POLICY)
        == anew
    )
    assert not any(work.node for work in works_of(Report(view, (), records, nobody), POLICY))


def cluster_at_rest() -> ClusterView:
    """A cluster of which nothing is to be told."""
    return Cluster(6, 1, 3, 3).view()


def test_comparisons_of_new_replicas_are_told_together_and_a_difference_alone() -> None:
    new, other = Voter(4, "ab" * 16, "h:1"), Voter(1, "cd" * 16, "h:2")
    made = [CopyMade(f"{n:032x}", "events", new, (other,)) for n in range(4)]
    alike = ((5, 7), (5, 7))
    checks = [
        CopyCheck(made[0], other, 1, alike),
        CopyCheck(made[1], other, 1, alike),
        CopyCheck(made[2], other, 1, ((5, 7), (4, 7))),
        CopyCheck(made[3], other, problem="its node is silent"),
    ]
    differs, equal, unknown = compared(checks, {"cdcdcdcd": "flights-node-1"})
    assert (
        differs.reason == "CopyDiffers"
        and differs.warning
        and "but flights-node-1 has 4 with" in differs.message
    )
    assert equal.reason == "CopiesCompared" and "replicas of 2 tablets hold the 10 rows" in equal.message
    assert unknown.reason == "CopiesNotCompared" and unknown.message.endswith("its node is silent")
    assert compared([], {}) == []

"""The annotation `stele.dev/plan` is answered once for each text and generation, in a bounded text, beside the passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from stele_operator.answers import TEXT_MAX, Answers, bounded, respond
from stele_operator.masters import MasterLink
from stele_operator.observe import parse_cluster
from stele_operator.plan import make_plan
from stele_operator.plan.foretold import Foretold, Restart, Said
from stele_operator.plan.observation import Catalog, Observation
from stele_operator.plan.status import cluster_status
from tests.operator.test_foretold import reported
from tests.operator.worlds import made

Json = dict[str, Any]


def observed(question: str, generation: int = 1) -> Observation:
    """A cluster of five nodes about which somebody asks."""
    o = reported(made().observe())
    return replace(o, cluster=replace(o.cluster, question=question, generation=generation))


def told(question: str) -> Foretold:
    """The answer."""
    o = observed(question)
    assert o.catalog is not None
    return respond(o, question, o.catalog)


def test_the_question_is_a_patch_of_the_present_spec() -> None:
    assert told("nodes: {replicas: 4}").order()[0] == "flights-node-4: leaves: nodes.replicas is 4"
    assert told('{"image": "x"}').order()[0].startswith("8 pods made again"), "five nodes stay five"
    assert told("{nodes: {replicas: 5}}").fine and not told("nodes: {replicas: 5}").events


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("{", "neither JSON nor YAML"),
        (
            "\n".join(
                ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, 12))]
            ),
            "it has an alias",
        ),
        ("nodes: &n {replicas: 4, more: *n}", "it has an alias"),
        ("4", 'such as {"nodes": {"replicas": 4}}'),
        ("nodes: {replicaz: 4}", "spec.nodes.replicaz"),
        ("nodes: {replicas: many}", "spec.nodes.replicas"),
        ("masters: {replicas: 4}", "masters.replicas"),
        ("nodes: {storage: {className: fast}}", "storage.className cannot change"),
        ("#" * 70_000, "longer than 64 KiB"),
    ],
)
def test_a_bad_question_is_refused(question: str, words: str) -> None:
    answer = told(question)
    assert not answer.fine and any(words in fault for fault in answer.refused), answer.refused


def test_the_text_is_bounded() -> None:
    restarts = tuple(
        Restart(f"flights-node-{n}", "", 0, 0, ("x" * 400,) * 20) for n in range(100)
    )  # one long line of risks
    events = tuple(Said(f"kind-{n}", "", "y" * 90) for n in range(200))
    text = bounded(Foretold("TabletCluster a/b", events=(*restarts, *events)))
    assert len(text) <= TEXT_MAX and text.endswith("more lines: `stele-operator plan -f` shows all")
    assert bounded(Foretold("c")).splitlines() == Foretold("c").lines()


async def woke(event: asyncio.Event) -> None:
    """Wait until the answer is there."""
    async with asyncio.timeout(30):
        await event.wait()


class Sizes:
    """A link to masters whose nodes say nothing more. `gate`: until it is set they say nothing at all."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0

    async def with_sizes(self, catalog: Catalog) -> Catalog:
        self.asked += 1
        await self.gate.wait()
        return catalog


async def test_it_is_answered_once_and_no_pass_waits_for_it() -> None:
    woken = asyncio.Event()
    answers, sizes = Answers(woken.set), Sizes()
    link = cast(MasterLink, sizes)
    o = observed("nodes: {replicas: 4}")
    assert answers.to(replace(o, catalog=None), link, None, "t0") is None
    assert o.catalog is not None
    new_leader = replace(o.catalog, view=replace(o.catalog.view, settled=False))
    assert answers.to(replace(o, catalog=new_leader), link, None, "t0") is None
    assert answers.to(o, link, None, "t1") is None
    assert answers.to(o, link, None, "t2") is None, "it is under way"
    sizes.gate.set()
    await woke(woken)
    answer = answers.to(o, link, None, "t3")
    assert answer is not None and answer["fine"] and answer["time"] == "t1" and sizes.asked == 1
    assert "flights-node-4" in answer["text"]
    status = cluster_status(o, make_plan(o), (), "now", answer)
    assert status["plan"] == answer
    assert Answers(woken.set).to(o, link, answer, "t4") is answer, "another operator answers no second time"

    other = replace(o, cluster=replace(o.cluster, question="nodes: {replicas: 2}"))
    woken.clear()
    assert answers.to(other, link, answer, "t5") is answer, "until the new one is there"
    await woke(woken)
    second = answers.to(other, link, answer, "t6")
    assert second is not None and not second["fine"] and "DrainRefused" in second["text"]
    woken.clear()
    later = replace(other, cluster=replace(other.cluster, generation=2))
    answers.to(later, link, second, "t7")
    await woke(woken)
    third = answers.to(later, link, second, "t8")
    assert third is not None and third["observedGeneration"] == 2
    assert answers.to(replace(o, cluster=replace(o.cluster, question=" ")), link, third, "t9") is None
    await answers.close()


async def test_a_fault_of_ours_is_told_and_stops_nothing() -> None:
    woken = asyncio.Event()
    answers, o = Answers(woken.set), observed("nodes: {replicas: 4}")

    class Broken:
        async def with_sizes(self, catalog: Catalog) -> Catalog:
            raise RuntimeError("a bug")

    link = cast(MasterLink, Broken())
    answers.to(o, link, None, "t1")
    await woke(woken)
    answer = answers.to(o, link, None, "t2")
    assert answer is not None and not answer["fine"] and "log says why" in answer["text"]
    await answers.close()


async def test_work_that_nobody_waits_for_ends() -> None:
    rounds = iter([False, False, True])
    o = observed("x")
    assert o.catalog is not None
    cut = respond(o, "image: x", o.catalog, lambda: next(rounds, True))
    assert not cut.complete and not cut.fine and any("did not end" in line for line in cut.lines())


def test_the_annotation_is_read() -> None:
    raw = made().cluster
    assert parse_cluster(raw).question == ""
    raw["metadata"]["annotations"] = {"stele.dev/plan": "nodes: {replicas: 4}"}
    assert parse_cluster(raw).question == "nodes: {replicas: 4}"

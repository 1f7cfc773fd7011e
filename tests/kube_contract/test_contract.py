"""Replays the recorded requests against stele_local: every answer must be the recorded one.

What stele_local leaves out is listed in LEFT_OUT, with the reason; an entry that no longer hides anything fails too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stele_local.cluster import LocalCluster, Settings
from tests.kube_contract.play import Player
from tests.kube_contract.record import RECORDINGS
from tests.kube_contract.scenarios import SCENARIOS

Json = dict[str, Any]
ABSENT = "<absent>"

# (scenario / step, path in the answer, why)
LEFT_OUT = (
    (r"discovery / version", r"\.body\.(git|go|compiler|buildDate)", "another server, another build"),
    (r"kind node / .*", r"spec\.(taints|podCIDRs?)|\.annotations|daemonEndpoints|nodeInfo", "a real cluster's own matters"),
    (r"kind (node|persistentvolume|poddisruptionbudget|pod) / .*", r"metadata\.resourceVersion", "controllers write meanwhile"),
    (r"kind persistentvolume / .*", r"status\.lastPhaseTransitionTime", "nobody asks"),
    (r"kind poddisruptionbudget / .*", r"body(\.items\[0\])?\.status\.", "no conditions"),
    (r"(kind pod|claims) / .*", r"status\.conditions", "the scheduler's wording"),
    (r"pods / .*", r"status\.podIPs", "our kubelet writes podIP and podIPs together"),
    (r"schema / another version", r"\.warnings", "no second pruning for a version that is refused"),
)  # fmt: skip


def differences(ours: Any, real: Any, part: bool, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two answers differ; with `part`, only what ours has is looked for in the real one."""
    if isinstance(ours, dict) and isinstance(real, dict):
        for key in sorted(ours if part else {*ours, *real}):
            below = f"{path}.{key}"
            if key in ours and key in real:
                yield from differences(ours[key], real[key], part, below)
            else:
                yield below, ours.get(key, ABSENT), real.get(key, ABSENT)
    elif isinstance(ours, list) and isinstance(real, list) and part:
        for item in ours:
            named = isinstance(item, dict) and "name" in item
            twin = next((r for r in real if r == item or (named and r.get("name") == item["name"])), ABSENT)
            yield from differences(item, twin, part, f"{path}[{item['name'] if named else item}]")
    elif isinstance(ours, list) and isinstance(real, list) and len(ours) == len(real):
        for index, (one, other) in enumerate(zip(ours, real)):
            yield from differences(one, other, part, f"{path}[{index}]")
    elif ours != real:
        yield path, ours, real


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Json]]:
    folder: Path = tmp_path_factory.mktemp("contract")
    async with LocalCluster(folder, Settings(machines=1)) as cluster:
        return await Player(cluster.url, {"Authorization": f"Bearer {cluster.token}"}).play_all()


def _recorded(scenario: str) -> list[Json]:
    return json.loads((RECORDINGS / f"{scenario.replace(' ', '_')}.json").read_text())


def _parts(scenario: str) -> set[str]:
    return {step.name for step in SCENARIOS[scenario] if step.part}


def _told(scenario: str, answers: dict[str, list[Json]]) -> list[tuple[str, str, Any, Any]]:
    ours, real = answers[scenario], _recorded(scenario)
    assert [a["step"] for a in ours] == [r["step"] for r in real], "record again: the steps have changed"
    return [
        (f"{scenario} / {one['step']}", path, a, b)
        for one, other in zip(ours, real)
        for path, a, b in differences(one, other, one["step"] in _parts(scenario))
    ]


def _excused(step: str, path: str) -> bool:
    return any(re.fullmatch(where, step) and re.search(what, path) for where, what, _ in LEFT_OUT)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_answers_as_recorded(scenario: str, answers: dict[str, list[Json]]) -> None:
    wrong = [row for row in _told(scenario, answers) if not _excused(row[0], row[1])]
    shown = "\n".join(
        f"{step} {path}\n   ours: {json.dumps(a)}\n   real: {json.dumps(b)}" for step, path, a, b in wrong
    )
    assert not wrong, f"{len(wrong)} differences from the real API server:\n{shown}"


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_excused_for_nothing(answers: dict[str, list[Json]]) -> None:
    rows = [row for scenario in SCENARIOS for row in _told(scenario, answers)]
    for where, what, why in LEFT_OUT:
        assert any(re.fullmatch(where, r[0]) and re.search(what, r[1]) for r in rows), (
            f"no longer needed: {where} {what} ({why})"
        )

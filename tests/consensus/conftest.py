"""Groups that stop when a test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from stele.consensus import quiet
from stele.tserver import quiet as quiet_groups
from tests.consensus import cluster
from tests.consensus.cluster import OPTIONS, STEADY, Group, Network, TestNode, make_group

MakeGroup = Callable[..., Awaitable[tuple[Group, list[TestNode]]]]


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses the lead by chance."""
    monkeypatch.setattr(cluster, "OPTIONS", STEADY)


@pytest.fixture
def quick_elections(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of elections: a leader that is gone is replaced at once, and one that stalls is taken for gone."""
    monkeypatch.setattr(cluster, "OPTIONS", OPTIONS)


@pytest.fixture
async def group_of(tmp_path: Path) -> AsyncIterator[MakeGroup]:
    """Makes a group; all nodes of its network are stopped at the end, restarted ones too."""
    made: list[list[TestNode]] = []

    async def make(
        size: int = 3, *, spare: int = 0, kind: str = "table", network: Network | None = None
    ) -> tuple[Group, list[TestNode]]:
        group, nodes = await make_group(tmp_path, size, spare=spare, kind=kind, network=network)
        made.append(nodes)
        return group, nodes

    yield make
    for nodes in made:
        for node in list(nodes[0].network.nodes.values()):
            await node.stop()


@pytest.fixture
def rests_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of nodes that watch them rest after a moment in which nothing happens."""
    monkeypatch.setattr(quiet, "QUIET_AFTER_MS", 200)
    monkeypatch.setattr(quiet_groups, "_LOOK_MS", 50)

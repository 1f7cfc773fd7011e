"""What tests of backups share: a cluster of real processes, for all tests of a module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import stele
from tests.client.commands import runner
from tests.harness.standing import standing


@dataclass(frozen=True)
class There:
    """A cluster and a client of it."""

    masters: str
    client: stele.Client


@pytest.fixture(scope="module")
def cluster_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    with standing(tmp_path_factory.mktemp("cluster")) as masters, stele.connect(masters) as client:
        yield There(masters, client)


@pytest.fixture
def there(cluster_of_module: There) -> Iterator[There]:
    """Without tables, before each test and after it."""
    yield cluster_of_module
    for info in cluster_of_module.client.list_tables():
        cluster_of_module.client.delete_table(info.name)


Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class At:
    """Where commands find the cluster."""

    master_address: str = "127.0.0.1:1"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command: exit code, standard output and standard error."""

    def now(*arguments: str | Path, masters: str = "127.0.0.1:1") -> tuple[int, str, str]:
        return asyncio.run(runner(At(masters), monkeypatch)("backup", *map(str, arguments)))

    return now

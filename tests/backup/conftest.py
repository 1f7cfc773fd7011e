"""What tests of backups share: a cluster of real processes, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import stele
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

"""Every block of docs/python.md and docs/flight.md, run on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stele
from examples.demo import flights
from tests.docs.blocks import blocks, make_table, run
from tests.harness.standing import standing


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster without tables, as the quick start makes one."""
    with standing(tmp_path_factory.mktemp("docs")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def masters(bare: str) -> str:
    """A cluster with the tables that the demo leaves, and some of its rows."""
    with stele.connect(bare) as client:
        for example in ("flights.yaml", "delays.yaml"):
            make_table(client, example)
        table = client.open_table("flights")
        table.write_arrow(flights.load(table.arrow_schema).slice(0, 5_000))
    return bare


def test_the_guide(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STELE_MASTERS", bare)
    run(blocks("docs/python.md"), {"__name__": "__main__"})


def test_changing_a_table(masters: str) -> None:
    with stele.connect(masters) as client:
        run(blocks("docs/keyspaces.md"), {"__name__": "__main__", "stele": stele, "client": client})
        for page in ("docs/altering.md", "docs/undelete.md", "docs/backup.md"):
            run(blocks(page), {"__name__": "__main__", "stele": stele, "client": client})


def test_flight(masters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has who pasted the demo's export line."""
    monkeypatch.setenv("STELE_MASTERS", masters)
    run(blocks("docs/flight.md"), {"__name__": "__main__"})

"""Every block of docs/python.md and docs/flight.md, run on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stele
from examples.demo import flights
from tests.docs.blocks import blocks, make_table, run
from tests.harness.standing import standing


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster with the tables that the demo leaves, and some of its rows."""
    with standing(tmp_path_factory.mktemp("docs")) as addresses:
        with stele.connect(addresses) as client:
            for example in ("flights.yaml", "delays.yaml"):
                make_table(client, example)
            table = client.open_table("flights")
            table.write_arrow(flights.load(table.arrow_schema).slice(0, 5_000))
        yield addresses


@pytest.fixture
def names(masters: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a reader has who pasted the demo's export line."""
    monkeypatch.setenv("STELE_MASTERS", masters)
    return {"__name__": "__main__"}


def test_changing_a_table(masters: str) -> None:
    with stele.connect(masters) as client:
        for page in ("docs/altering.md", "docs/undelete.md", "docs/backup.md"):
            run(blocks(page), {"__name__": "__main__", "stele": stele, "client": client})


def test_the_guide(names: dict[str, object]) -> None:
    run(blocks("docs/python.md"), names)


def test_flight(names: dict[str, object]) -> None:
    run(blocks("docs/flight.md"), names)

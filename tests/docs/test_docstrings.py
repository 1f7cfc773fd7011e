"""Every public name of `import stele` has an example in its docstring, and each example does what it shows, on a real cluster."""

from __future__ import annotations

import doctest
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

import stele
from tests.docs.blocks import ROOT
from tests.harness.standing import standing

BLOCKING = ("Client", "Table", "Scanner", "Session", "KeySpace", "Watch", "Lease")
"""Each method of these has an example of its own; those of the asynchronous classes are the same with `await`."""
PUBLIC = [name for name in stele.__all__ if name != "__version__"]


def methods(cls: type) -> dict[str, Any]:
    """Public methods and properties by name, those with a docstring of the class itself."""
    found = {name: getattr(each, "fget", each) for name, each in vars(cls).items() if name[0] != "_"}
    return {name: each for name, each in found.items() if inspect.isfunction(each)}


EXAMPLES = {name: getattr(stele, name) for name in PUBLIC} | {
    f"{cls}.{name}": each
    for cls in (*BLOCKING, "TableInfo", "Schema")
    for name, each in methods(getattr(stele, cls)).items()
    if ">>>" in (each.__doc__ or "") or cls in BLOCKING
}
INTERNAL = {"Client.end"}
"""Called by scans alone."""


@dataclass(frozen=True)
class There:
    """A cluster and a client of it."""

    masters: str
    client: stele.Client


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    """With the table that the examples are about."""
    with standing(tmp_path_factory.mktemp("docstrings")) as masters, stele.connect(masters) as client:
        columns = [("day", "date"), ("name", "string"), ("value", "double", True)]
        schema = stele.Schema.make(columns, key=["day", "name"])
        client.create_table("readings", schema, stele.hash("day", "name", buckets=4))
        yield There(masters, client)


@pytest.fixture
def names(there: There) -> Iterator[dict[str, Any]]:
    """What examples may use; what they made is gone afterwards, and the table has the same two rows before each."""
    client = there.client
    table = client.open_table("readings")
    table.write_arrow(table.scan(["day", "name"]).to_table(), "delete")
    table.put({"day": date(2024, 5, 1), "name": "roof", "value": 21.5})
    table.put({"day": date(2024, 5, 1), "name": "cellar", "value": 12.0})
    modules = {"stele": stele, "pa": pa, "time": time, "date": date, "datetime": datetime, "UTC": UTC}
    yield {**modules, "masters": there.masters, "client": client, "table": table}
    for info in client.list_tables():
        if info.name != "readings":
            client.delete_table(info.name)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_has_an_example(name: str) -> None:
    documentation = inspect.getdoc(EXAMPLES[name]) or ""
    assert documentation, name
    if name not in INTERNAL:
        assert "\nExample:\n" in documentation and ">>> " in documentation, name


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - INTERNAL))
def test_each_example_does_what_it_shows(name: str, names: dict[str, Any]) -> None:
    if name.startswith(("KeySpace.", "Key", "Watch", "Lease")) and name != "KeySpace":
        names["space"] = names["client"].create_keyspace("space")
    documentation = inspect.getdoc(EXAMPLES[name]) or ""
    (example,) = [doctest.DocTestParser().get_doctest(documentation, names, name, None, 0)]
    told: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert outcome.attempted and not outcome.failed, "".join(told)


def test_the_reference_has_each_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in PUBLIC if f"::: stele.{name}\n" not in text] == []

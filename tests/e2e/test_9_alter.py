"""The columns of a table change while it is written: renamed and added, then renamed back and dropped. The operator does it."""

from __future__ import annotations

import json

import yaml

from tests.e2e.bench import CLUSTER, EXAMPLES, NAMESPACE, Bench, Json
from tests.e2e.test_9_leaders import spread_soon


def example_columns() -> list[Json]:
    """The columns of the table of flights, as its example has them."""
    found: list[Json] = yaml.safe_load((EXAMPLES / "flights.yaml").read_text())["spec"]["columns"]
    return found


def renamed(columns: list[Json], old: str, new: str) -> list[Json]:
    """The columns, one of them with another name."""
    return [{**c, "name": new, "renamedFrom": old} if c["name"] == old else c for c in columns]


def described(bench: Bench) -> Json:
    """The table, as `stele table describe` has it."""
    master = bench.pods("master")[0].metadata.name
    masters = f"{CLUSTER}-masters.{NAMESPACE}:7051"
    told: Json = json.loads(
        bench.execute(master, "stele", "table", "describe", CLUSTER, "--masters", masters, "--json")
    )
    return told


def test_columns_change_under_writes(bench: Bench) -> None:
    """A program that has the table open goes on through all of it, with the names that it knows."""
    bench.have(fresh=True)
    columns = example_columns()
    names = [c["name"] for c in columns]
    loaded = bench.program("load")
    stream = bench.stream()

    def altered(wanted: list[str]) -> bool:
        table = described(bench)
        now = [c["name"] for c in table["columns"]]
        return sorted(now) == sorted(wanted) and table["state"] == "RUNNING" and bench.whole()

    changed = [*renamed(columns, "dest", "destination"), {"name": "gate", "type": "string", "nullable": True}]
    bench.patch("TabletGroup", {"columns": changed})
    bench.until("dest is destination, and gate is there", lambda: altered([c["name"] for c in changed]))
    bench.patch("TabletGroup", {"columns": columns})
    bench.until(
        "a column that is left out is not dropped unasked",
        lambda: bench.condition("TabletGroup", "Stalled")["reason"] == "TableDiffers",
    )
    bench.note(f"          {bench.condition('TabletGroup', 'Stalled')['message']}")
    back = [{**c, "renamedFrom": "destination"} if c["name"] == "dest" else c for c in columns]
    bench.patch("TabletGroup", {"columns": back, "allowColumnDrop": True})
    bench.until("the table is as it was", lambda: altered(names))
    spread_soon(bench)
    bench.until("nothing differs", lambda: bench.condition("TabletGroup", "Stalled")["status"] == "False")
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)

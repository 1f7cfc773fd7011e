"""Ranges of a TabletGroup on real pods, as docs tell it: added while the operator is killed, kept, dropped with their rows."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.e2e.bench import EXAMPLES, NAMESPACE, Bench, Json
from tests.e2e.test_5_operator import kill_process

TABLE = "readings"
_PROGRAM = """
import datetime, json, sys
import stele
told = []
with stele.connect({masters!r}) as client:
    table = client.open_table("readings")
    for day in sys.argv[1:]:
        try:
            for sensor in range(20):
                table.put(dict(day=datetime.date.fromisoformat(day), sensor=sensor, value=1.5))
        except Exception as exc:
            told.append(day + ": " + str(exc))
    print(json.dumps(dict(refused=told, rows=table.scan().to_table().num_rows)))
"""


def span(month: int) -> Json:
    """The range of a month of 2026."""
    return {"from": [f"2026-{month:02}-01"], "to": [f"2026-{month + 1:02}-01"]}


def put(bench: Bench, *days: str) -> tuple[list[str], int]:
    """Write 20 rows for each day, in the pod of a node. Returns what was refused, and how many rows there are."""
    pod = bench.pods("node")[0].metadata.name
    text = _PROGRAM.format(masters=f"flights-masters.{NAMESPACE}:7051")
    said = bench.execute(pod, "python", "-c", text, *days)
    found = json.loads(said.strip().splitlines()[-1])
    return found["refused"], found["rows"]


def ask(bench: Bench, *months: int, **more: Any) -> None:
    """Other ranges of the TabletGroup."""
    ranges = {"partitioning": {"range": {"ranges": [span(month) for month in months]}}, **more}
    bench.custom.patch_namespaced_custom_object(*bench.where("TabletGroup"), TABLE, {"spec": ranges})


def has(bench: Bench, tablets: int) -> bool:
    """Whether so many tablets serve."""
    found = bench.kube.status("TabletGroup", TABLE).get("tablets") or {}
    return bench.ready("TabletGroup", TABLE) and found.get("total") == found.get("healthy") == tablets


def test_ranges_are_added_kept_and_dropped(bench: Bench) -> None:
    bench.have(patient=True)
    bench.apply("months")
    example = yaml.safe_load((EXAMPLES / "months.yaml").read_text())["spec"]["partitioning"]
    assert len(example["range"]["ranges"]) == 2
    bench.until("two months serve", lambda: has(bench, 4))
    refused, rows = put(bench, "2026-01-05", "2026-02-05", "2026-03-05")
    assert rows == 40 and len(refused) == 1 and "no range" in refused[0], refused

    ask(bench, 1, 2, 3)
    (operator,) = bench.operators()
    kill_process(bench, operator)
    bench.until("the third month serves", lambda: has(bench, 6))
    assert put(bench, "2026-03-05") == ([], 60)

    ask(bench, 2, 3)

    def differs() -> bool:
        told = bench.condition("TabletGroup", "Stalled", TABLE)
        return bool(told["reason"] == "TableDiffers" and "2026-01-01" in told["message"])

    bench.until("it says that a range is not dropped", differs)
    bench.note(f"          {bench.condition('TabletGroup', 'Stalled', TABLE)['message']}")
    assert has(bench, 6) and put(bench) == ([], 60)
    ask(bench, 2, 3, allowRangeDrop=True)
    bench.until("January is dropped", lambda: has(bench, 4))
    refused, rows = put(bench, "2026-01-05")
    assert rows == 40 and "no range" in refused[0], refused
    ask(bench, 1, 2, 3, allowRangeDrop=False)
    bench.until("January is there again, and empty", lambda: has(bench, 6))
    assert put(bench) == ([], 40) and put(bench, "2026-01-05") == ([], 60)
    assert bench.condition("TabletGroup", "Stalled", TABLE)["status"] == "False"
    bench.custom.delete_namespaced_custom_object(*bench.where("TabletGroup"), TABLE)
    bench.until("the table goes", lambda: TABLE not in bench.names("TabletGroup"))
    bench.until("whole", bench.whole)

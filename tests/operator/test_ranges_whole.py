"""Ranges of a TabletGroup on real processes: made, added while the operator is killed, kept, dropped with their rows, made anew."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient
from stele.model.errors import Rejected
from tests.operator.cluster import Bench, bench
from tests.operator.test_whole import COLUMNS, ROWS, count, masters, ready, write

HALF = ROWS // 2


def span(start: int, end: int) -> dict[str, Any]:
    """A range as a TabletGroup has it."""
    return {"from": [start], "to": [end]}


FIRST, SECOND, THIRD = span(0, HALF), span(HALF, ROWS), span(ROWS, 2 * ROWS)


async def ask(made: Bench, *ranges: dict[str, Any], **more: Any) -> None:
    """Other ranges of the TabletGroup."""
    spec = {"partitioning": {"range": {"ranges": list(ranges)}}, **more}
    await made.kube.patch("TabletGroup", "default", "flights", {"spec": spec})


async def put(made: Bench, key: int) -> None:
    """Write a row."""
    async with AsyncClient(",".join(await masters(made)), timeout_s=60) as client:
        await (await client.open_table("flights")).put({"id": key, "text": "late"})


async def tablets(made: Bench) -> int:
    """How many tablets the status of the TabletGroup counts, if all are healthy; else 0."""
    group = await made.kube.get("TabletGroup", "default", "flights")
    counts = ((group or {}).get("status") or {}).get("tablets") or {}
    return counts.get("total", 0) if counts.get("healthy") == counts.get("total") else 0


@pytest.mark.chaos
async def test_ranges_are_made_added_kept_and_dropped(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=3) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 3, "storage": {"size": "1Gi"}})
        parts = {
            "hash": [{"columns": ["id"], "buckets": 2}],
            "range": {"columns": ["id"], "ranges": [SECOND, FIRST]},
        }
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=parts)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"), 240)
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"), 240)
        assert await tablets(made) == 4
        await write(made)
        with pytest.raises(Rejected, match="no range"):
            await put(made, ROWS)

        await ask(made, FIRST, SECOND, THIRD)
        await made.end(signal.SIGKILL)
        await made.start()

        async def has(number: int) -> bool:
            return await tablets(made) == number and await ready(made, "TabletGroup")

        await made.until("the third range serves", lambda: has(6), 240)
        await put(made, ROWS)
        assert await count(made) == ROWS + 1

        await ask(made, SECOND, THIRD)

        async def differs() -> bool:
            told = await made.condition("TabletGroup", "flights", "Stalled")
            return told[:2] == ("True", "TableDiffers") and f"a range 0..{HALF} that" in told[2]

        await made.until("it says that a range is not dropped", differs)
        assert await count(made) == ROWS + 1 and await has(6)
        await ask(made, SECOND, THIRD, allowRangeDrop=True)
        await made.until("the first range is dropped", lambda: has(4), 240)
        assert await count(made) == HALF + 1
        with pytest.raises(Rejected, match="no range"):
            await put(made, 1)

        await ask(made, FIRST, SECOND, THIRD, allowRangeDrop=False)
        await made.until("it is there again", lambda: has(6), 240)
        assert await count(made) == HALF + 1, "and it is empty"
        await put(made, 1)
        assert await count(made) == HALF + 2
        assert (await made.condition("TabletGroup", "flights", "Stalled"))[0] == "False"

        await ask(made, SECOND, THIRD, allowRangeDrop=True)
        await made.until("the same change is made once more", lambda: has(4), 240)
        assert await count(made) == HALF + 1

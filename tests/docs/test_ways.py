"""docs/design.md says by which functions a put, a scan and a heal enter each package: they exist, and are called in the end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stele.client import Client
from tests.docs.blocks import ROOT
from tests.docs.sources import Calls, Function, defined, functions_of, place, steps
from tests.tserver.local import SCHEMA, LocalCluster

DESIGN = ROOT / "docs" / "design.md"
PAGES = {"A put": "put.md", "A heal": "heal-in-code.md"}
"""Where every function on the way is listed, which other tests hold against real calls."""
IN_FLIGHT_THREADS = {
    *(("rpc/flight.py", name) for name in ("_Server.do_get", "_Batches.__next__")),
    ("tserver/scan.py", "Scans.scan"),
    ("tablet/view.py", "View.scan"),
}
"""Called in threads that C++ started, which no profile of Python sees."""


def doors(way: str) -> Iterator[tuple[str, list[Function], list[Function], str]]:
    """(package, where it is entered, where again, why again) of each row of a table."""
    section = DESIGN.read_text().split(f"### {way}\n")[1].split("\n#")[0]
    for package, first, again, why in re.findall(
        r"^\| (\w+) \| (.*?) \| (.*?) ?\| (.*?) ?\|$", section, re.MULTILINE
    ):
        if package != "package":
            yield package, functions_of(first), functions_of(again), why


WAYS = ("A put", "A scan", "A heal")


@pytest.mark.parametrize("way", WAYS)
def test_each_package_has_one_row_and_says_why_it_is_entered_again(way: str) -> None:
    rows = list(doors(way))
    packages = [package for package, *_ in rows]
    assert packages and len(packages) == len(set(packages))
    for package, first, again, why in rows:
        assert first and bool(again) == bool(why), package
        for file, name in (*first, *again):
            assert file.split("/")[0].removeprefix("stele_") == package
            assert name in defined(place(file)).own, f"{file} has no {name}"


@pytest.mark.parametrize("way", PAGES)
def test_each_door_stands_on_the_page_that_lists_the_whole_way(way: str) -> None:
    listed = {
        function for row in steps(ROOT / "docs" / PAGES[way]).values() for step in row for function in step
    }
    named = {function for _, first, again, _ in doors(way) for function in (*first, *again)}
    assert named <= listed
    packages = {file.split("/")[0].removeprefix("stele_") for file, _ in listed} - {"model"}
    assert packages == {package for package, *_ in doors(way)}


async def test_a_scan_goes_through_the_functions_that_the_page_names(tmp_path: Path) -> None:
    named = [function for _, first, again, _ in doors("A scan") for function in (*first, *again)]
    with Calls(set(named)) as calls:

        def scan(master: str) -> None:
            with Client([master], timeout_s=60) as client:
                table = client.create_table("t", SCHEMA)
                table.put({"id": 1, "name": "row"})
                calls.record()
                assert table.scan().to_table().num_rows == 1

        cluster = await LocalCluster(tmp_path).start()
        try:
            await asyncio.to_thread(scan, cluster.master_address)
        finally:
            await cluster.close()
    made = [function for function in dict.fromkeys(calls.made) if function not in IN_FLIGHT_THREADS]
    assert made == [function for function in named if function not in IN_FLIGHT_THREADS]

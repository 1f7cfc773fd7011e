"""docs/flight.md's programs in Java, Go and R, built and run as the page says: they read every row of a real cluster's table."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stele
from examples.demo import flights
from tests.docs.blocks import ROOT, blocks, make_table
from tests.harness.standing import standing

PAGE = "docs/flight.md"
ROWS = 500
LARGE = "x" * (5 << 20)
"""Its batch is larger than gRPC takes unless it is told to."""
JVM = ROOT / "pipeline" / "jvm"
OUT_OF_REACH = re.compile(
    r"Could not transfer |Cannot access .* in offline mode|No plugin found for prefix"
    r"|requires go >=|module lookup disabled|Get \"https?://.*(dial|lookup|timeout|refused|TLS)"
)
"""What Maven and Go say where their registry does not answer. A version that does not exist is told otherwise."""
COLOURS = re.compile(r"\x1b\[\d*m")
"""Maven resets them even if it prints nothing else."""
CHEAP = {"CGO_ENABLED": "0", "GOFLAGS": "'-gcflags=all=-N -l' -ldflags=-s", "GOTOOLCHAIN": "local"}
"""Go builds in half the time when it does not optimize. What it has built is kept in its cache."""
Row = tuple[Any, ...]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, pa.Table]]:
    """(Masters, rows of the table flights): the first real flights, and one with a very long text."""
    with standing(tmp_path_factory.mktemp("clients")) as masters, stele.connect(masters) as client:
        make_table(client, "flights.yaml")
        table = client.open_table("flights")
        rows = flights.load(table.arrow_schema).slice(0, ROWS)
        table.write_arrow(rows)
        table.put({**rows.slice(0, 1).to_pylist()[0], "flight": 0, "tailnum": LARGE})
        yield masters, table.scan().to_table()


def printed(language: str, file: str, folder: Path, masters: str) -> str:
    """What a reader sees who saves the blocks of one part as files and runs its commands. Skips the test where the registry
    does not answer."""
    part = {"java": "Java", "go": "Go", "r": "R"}[language]
    (program,) = blocks(PAGE, language=language, heading=part)
    (commands,) = blocks(PAGE, language="sh", heading=part)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **CHEAP, "PATH": path, "STELE_MASTERS": f"{masters},127.0.0.9:1"}
    words = ["bash", "-ec", commands.code]
    for attempt in range(5):  # a tablet may have no leader just now, on a busy machine
        here = folder / str(attempt)
        here.mkdir()
        (here / file).write_text(program.code)
        for project in blocks(PAGE, language="xml", heading=part):
            (here / "pom.xml").write_text(project.code)
        done = subprocess.run(
            words, cwd=here, env=environment, capture_output=True, encoding="utf-8", check=False
        )
        if not done.returncode or "Detail: Unavailable" not in done.stderr + done.stdout:
            break
    told = done.stdout[-2_000:] + done.stderr[-6_000:]
    if done.returncode and (why := OUT_OF_REACH.search(told)):
        pytest.skip(f"the registry of {part} gives nothing here: {told[why.start() :].splitlines()[0]}")
    assert done.returncode == 0, told
    return COLOURS.sub("", done.stdout)


def same(found: list[Row], expected: pa.Table) -> None:
    """Row by row, in the order of the key."""
    rows = [tuple(row.values()) for row in expected.to_pylist()]
    assert len(rows) == ROWS + 1
    for one, other in zip(sorted(found, key=str), sorted(rows, key=str), strict=True):
        assert one == other


def values(table: pa.Table, parse: dict[str, Callable[[Any], Any]]) -> Callable[[dict[str, Any]], Row]:
    """Makes the values of one row from what a program printed, by the types of their columns."""
    types = [(field.name, parse[str(field.type)]) for field in table.schema]

    def row(given: dict[str, Any]) -> Row:
        assert set(given) == set(table.column_names)
        return tuple(None if given[name] is None else make(given[name]) for name, make in types)

    return row


def test_java(cluster: tuple[str, pa.Table], tmp_path: Path) -> None:
    masters, expected = cluster
    check = subprocess.run([sys.executable, str(JVM / "build.py"), "--check"], capture_output=True, text=True)
    if check.returncode:
        pytest.skip(f"no Maven and Java 17 on this machine: {check.stderr.strip()}")
    told = printed("java", "ReadTable.java", tmp_path, masters)
    zone = expected.schema.field("time_hour").type
    make = values(
        expected,
        {
            "int64": int,
            "double": float,
            "string": str,
            str(zone): lambda text: pa.scalar(int(text), pa.int64()).cast(zone).as_py(),
        },
    )
    header = "\t".join(expected.column_names)
    lines = [line.split("\t") for line in told.splitlines() if line != header]
    assert len(told.splitlines()) > len(lines), "the names of the columns stand before the rows"
    rows = [{n: None if v == "null" else v for n, v in zip(expected.column_names, line)} for line in lines]
    same([make(row) for row in rows], expected)


def of_texts(expected: pa.Table) -> Callable[[dict[str, Any]], Row]:
    """As `values`, for programs that print numbers as they are or as text, and times as ISO 8601."""
    zone = expected.schema.field("time_hour").type
    return values(
        expected,
        {
            "int64": int,
            "double": float,
            "string": str,
            str(zone): lambda text: pa.array([text]).cast(zone)[0].as_py(),
        },
    )


def test_go(cluster: tuple[str, pa.Table], tmp_path: Path) -> None:
    masters, expected = cluster
    if shutil.which("go") is None:
        pytest.skip("no Go on this machine")
    told = printed("go", "main.go", tmp_path, masters)
    make = of_texts(expected)
    same([make(row) for line in told.splitlines() for row in json.loads(line)], expected)


def test_r(cluster: tuple[str, pa.Table], tmp_path: Path) -> None:
    masters, expected = cluster
    there = ["Rscript", "-e", "library(reticulate)"]
    if shutil.which("Rscript") is None or subprocess.run(there, capture_output=True, check=False).returncode:
        pytest.skip("no R with the package reticulate on this machine")
    told = printed("r", "read.R", tmp_path, masters)
    make = of_texts(expected)
    csv.field_size_limit(2 * len(LARGE))
    rows = [
        {n: None if v == "NA" else v for n, v in row.items()} for row in csv.DictReader(io.StringIO(told))
    ]
    same([make(row) for row in rows], expected)


def test_java_has_the_version_of_our_own_reader() -> None:
    (project,) = blocks(PAGE, language="xml", heading="Java")
    ours = re.search(r"<arrow.version>(.+)<", (JVM / "pom.xml").read_text())
    assert ours and set(re.findall(r"<version>(.+\..+)</version>", project.code)) == {ours[1]}

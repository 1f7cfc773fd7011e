"""The line that shows how far a save is: real sockets and terminals, and a real Spark whose user sits at one."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from stele.client import Client
from stele_spark.progress import Display, path_at_terminal, telling
from tests.spark.standalone import environment
from tests.spark.tasks import PARTITIONING, SCHEMA

ROWS, TASKS = 200_000, 4
LINE = re.compile(r"\rstele: table t: ([\d,]+) rows, ([\d,]+) rows/s, (\d) of 4 tasks\x1b\[K")
GONE = "\r\x1b[K"


@contextmanager
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal to write to, and all that it has shown so far."""
    theirs, ours = pty.openpty()
    os.set_blocking(theirs, False)
    shown = b""

    def read() -> str:
        nonlocal shown
        try:
            while piece := os.read(theirs, 65_536):
                shown += piece
        except OSError:  # nothing more yet, or nobody writes any more
            pass
        return shown.decode()

    with os.fdopen(ours, "w") as out:
        yield out, read
    os.close(theirs)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)


def test_a_part_that_was_tried_twice_counts_once_and_the_line_goes_with_the_stage() -> None:
    stages = {7: 4}
    with terminal() as (out, shown):
        display = Display(out, stages.get)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for junk in (b"", b"\xff", b"[]", b'{"stage": 7}'):
                stranger.sendto(junk, display.path)
        with pytest.raises(OSError, match="no more"), telling(display.path, "t", 7, 0, 0) as first:
            assert first is not None
            first(1_000)
            until(lambda: bool(LINE.findall(shown())))
            raise OSError("no more")
        until(lambda: shown().endswith(GONE))  # what Spark says of the error stands alone
        with telling(display.path, "t", 7, 0, 1) as second, telling(display.path, "t", 7, 1, 0) as other:
            assert second is not None and other is not None
            second(1_500)
            other(20)
            time.sleep(0.25)
            second(1_500)
            until(lambda: "3,020" in {rows for rows, _, _ in LINE.findall(shown())})
            assert shown().endswith("0 of 4 tasks\x1b[K")
        until(lambda: shown().endswith("2 of 4 tasks\x1b[K"))
        stages.clear()
        until(lambda: shown().endswith(GONE))
        # A copy of the task that Spark has given up says more.
        with telling(display.path, "t", 7, 1, 1):
            time.sleep(1)
        assert shown().endswith(GONE)


def test_the_line_is_gone_once_all_tasks_are_done() -> None:
    """The stage still stands, and what Spark prints comes next."""
    with terminal() as (out, shown):
        display = Display(out, {3: 1}.get)
        with telling(display.path, "t\x1b[2J", 3, 0, 0) as tell:
            assert tell is not None
            tell(5)
            until(lambda: "1 tasks" in shown())
        until(lambda: shown().endswith(GONE))
        assert "\x1b[2J" not in shown(), "a name does nothing to a terminal"


def test_without_a_terminal_or_a_display_nothing_is_shown_and_no_task_minds(tmp_path: Path) -> None:
    assert not sys.stderr.isatty() and path_at_terminal() is None
    for path in (None, "", "off", str(tmp_path / "nobody")):
        with telling(path, "t", 0, 0, 0) as tell:
            if tell is not None:
                tell(5)


PROGRAM = f"""
import sys, time
import pyarrow as pa
from stele_spark.session import session

def rows(batches):
    for batch in batches:
        time.sleep(0.1)
        yield pa.RecordBatch.from_pydict({{"id": batch.column(0), "v": ["x"] * batch.num_rows}})

spark = session("progress", cores=2)
spark.sparkContext.setLogLevel("OFF")
frame = spark.range({ROWS}, numPartitions={TASKS}).mapInArrow(rows, "id long, v string")
frame.write.format("stele").options(masters=sys.argv[1], table="t").mode("append").save()
spark.stop()
"""


@pytest.mark.spark
def test_a_user_at_a_terminal_sees_how_far_a_save_is(masters: str) -> None:
    with Client(masters) as client:
        table = client.create_table("t", SCHEMA, PARTITIONING)
        with terminal() as (out, shown):
            program = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, masters],
                env=environment(TERM="xterm"),
                stdout=subprocess.DEVNULL,
                stderr=out,
            )
            while program.poll() is None:
                shown()
                time.sleep(0.05)
            said = shown()
        assert program.returncode == 0, said
        assert table.scan().count() == ROWS
    lines = [(int(rows.replace(",", "")), int(done)) for rows, _, done in LINE.findall(said)]
    assert lines and lines == sorted(lines) and 0 < lines[-1][0] <= ROWS, said
    before, _, after = said.rpartition(GONE)
    assert LINE.search(before) and after.splitlines() == [f"stele: table t: written upsert {ROWS}"], said

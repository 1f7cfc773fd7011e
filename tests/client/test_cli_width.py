"""Tables fit the terminal that they are printed to, and nothing is cut for a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.cli.width import cells_of, fitted

ROWS = [["name", "state", "address"], ["flights-node-3", "alive", "10.0.0.7:7050"], ["x", "silent", "y"]]


def test_what_fits_is_printed_as_it_is() -> None:
    table = fitted(ROWS, 80)
    assert table == fitted(ROWS, None)
    assert table.lines[1] == "flights-node-3  alive   10.0.0.7:7050"


def test_the_widest_cells_are_cut_first_and_columns_without_place_are_named() -> None:
    table = fitted(ROWS, 30)
    assert table.lines[1] == "flights-n…  alive   10.0.0.7:…" and not table.left_out
    table = fitted(ROWS, 20)
    assert table.lines[1] == "flights-nod…  alive" and table.left_out == ["address"]
    many = [[f"c{n}" for n in range(19)], ["value"] * 19]
    assert fitted(many, 30).left_out == [f"c{n}" for n in range(4, 19)]


def test_a_column_that_is_kept_whole_is_cut_last() -> None:
    table = fitted(ROWS, 32, whole=1)
    assert table.lines[1] == "flights-node-3  alive   10.0.0.…" and table.cut
    table = fitted(ROWS, 24, whole=1)
    assert table.lines[1] == "flights-node-3  alive" and table.left_out == ["address"] and not table.cut
    assert fitted(ROWS, 8, whole=1).lines[1] == "flights…"


@given(
    st.integers(1, 6).flatmap(
        lambda columns: st.lists(
            st.lists(st.text("ab 日é\u0301", max_size=30), min_size=columns, max_size=columns), min_size=1
        )
    ),
    st.integers(2, 120),
)
def test_no_line_is_wider_than_the_terminal(rows: list[list[str]], width: int) -> None:
    table = fitted(rows, width)
    assert all(cells_of(line) <= width for line in table.lines)
    assert len(table.lines) == len(rows)
    assert len(table.left_out) < len(rows[0])


PROGRAM = """
from stele.cli.output import show_table
show_table(("a", "b", "c"), [("x" * 30, "y" * 30, "z" * 30)], all_shown_by="--json")
"""


@pytest.mark.parametrize(("terminal", "shown"), [(True, False), (False, True)])
def test_a_terminal_gets_what_fits_and_a_pipe_all(terminal: bool, shown: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        environment = {**os.environ, "COLUMNS": "24"}
        command = [sys.executable, "-c", PROGRAM]
        if terminal:
            subprocess.run(command, stdout=theirs, env=environment, check=True)
            out = os.read(ours, 65_536).decode()
        else:
            out = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout.decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("z" * 30 in out) is shown
    assert ("not shown: c; --json shows all" in out) is not shown

"""A terminal takes no orders from what other processes and people wrote: names, rows, errors, reasons, log lines."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import click
import pytest
import structlog

import stele.cli
from stele.cli import ksck, kv, output
from stele.cli.errors import error_line
from stele.client.health import ClusterHealth, NodeHealth, TabletHealth
from stele.model.errors import Rejected
from stele.model.texts import printable
from stele.rpc import logging

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\r\nfake line\x7f"
"""Sets a title, clears the screen, a colour by C1, overrides of direction, a line of its own, DEL."""
ORDERS = [c for c in EVIL if not c.isprintable()]


def clean(text: str) -> bool:
    """Whether only line ends of ours are in it."""
    return not any(c in text for c in ORDERS if c != "\n") and "\nfake" not in text and "fake line" in text


def test_a_line_and_a_table_escape_what_does_not_print(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(f"hello {EVIL}")
    output.say(EVIL, err=True)
    output.show_table((EVIL, "b"), [(EVIL, EVIL), ("plain", "é")])
    output.show_json({EVIL: EVIL})
    shown = capsys.readouterr()
    assert clean(shown.out.replace("\x7f", "")) and clean(shown.err)
    assert "\\x1b]0;owned\\x07" in shown.err and "é" in shown.out


def test_what_a_cluster_says_of_itself_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    node = NodeHealth("1" * 32, EVIL, "node", EVIL, EVIL, EVIL, "silent", 5_000, True, True, 1, None, True)
    new = NodeHealth("2" * 32, EVIL, "node", EVIL, EVIL, EVIL, "new", 0, False, False, 0, None, False)
    tablet = TabletHealth("3" * 32, "4" * 32, EVIL, "unavailable", "", 3, 1, [EVIL], [])
    ksck.show(ClusterHealth("5" * 32, "", [node, new], [tablet], [EVIL], True))
    output.say(f"stele: {error_line(Rejected(f'no table {EVIL}'))}", err=True)
    shown = capsys.readouterr()
    assert clean(shown.out) and clean(shown.err)


class Terminal(io.StringIO):
    """A standard output that is one."""

    def isatty(self) -> bool:
        return True


def test_bytes_leave_as_they_are_but_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sink = output.raw_output()
    assert sink.write(b"key\tvalue " + EVIL.encode() + b"\xff\n") == len(EVIL.encode()) + 12
    shown = terminal.getvalue()
    assert not any(c in shown for c in ORDERS if c != "\n") and "\\xff" in shown
    assert shown.startswith("key\tvalue ") and kv.raw_output is output.raw_output
    pipe = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", pipe)
    assert output.raw_output() is pipe.buffer


def test_log_lines_in_text_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        logging.setup(json_lines=False)
        structlog.get_logger("x").warning(f"event {EVIL}", error=EVIL, source=["a", EVIL])
    finally:
        structlog.reset_defaults()
    assert clean(stream.getvalue()) and stream.getvalue().count("\n") == 1


def test_every_command_prints_through_one_module() -> None:
    """A print of its own would give a terminal what it was given."""
    found = []
    for path in sorted(Path(stele.cli.__file__).parent.glob("*.py")):
        if path.name == "output.py":
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                name = ast.unparse(call.func)
                if name in (
                    "print",
                    "click.echo",
                    "click.secho",
                    "sys.stdout.write",
                    "sys.stdout.buffer.write",
                ):
                    found.append(f"{path.name}:{call.lineno}: {name}")
    assert found == []
    assert click.echo is not output.say and printable("plain é") == "plain é"

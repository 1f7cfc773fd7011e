"""Log lines: colours are for terminals, and each line names its node."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import structlog
from stele.rpc.logging import setup
setup(json_lines=sys.argv[1] == "json", node_id=sys.argv[2])
log = structlog.get_logger("stele.test")
log.warning("one", node="another")
thread = threading.Thread(target=lambda: log.error("two"))
thread.start()
thread.join()
"""


def run(form: str, terminal: bool, program: str = PROGRAM, **environment: str) -> str:
    """What the program logs."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | environment
    command = [sys.executable, "-c", program, form, "0123456789abcdef" * 2]
    if not terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, env=clean, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, stderr=theirs, env=clean, check=True)
        return os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (False, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_text_has_colours_on_a_terminal_alone(
    terminal: bool, environment: dict[str, str], coloured: bool
) -> None:
    told = run("text", terminal, **environment)
    assert ("\x1b[" in told) is coloured
    assert told.count("one") == told.count("two") == 1


def test_each_line_names_its_node_whichever_thread_it_comes_from() -> None:
    first, second = map(json.loads, run("json", terminal=False).splitlines())
    assert (first["local_node"], first["node"], second["local_node"]) == ("01234567", "another", "01234567")
    assert run("text", terminal=False).count("local_node=01234567") == 2


OF_LIBRARIES = r"""
import asyncio, logging, sys
from stele.rpc.logging import setup
setup(json_lines=sys.argv[1] == "json", node_id=sys.argv[2])
logging.getLogger("library").warning("first %s", "\x1b[2Jof two\nlines")
logging.getLogger("library").info("not told")
logging.getLogger("library").log(35, "between two levels")
async def main():
    asyncio.create_task(fail())
    await asyncio.sleep(0)
async def fail():
    raise ValueError("nobody asks")
asyncio.run(main())
"""


def test_lines_of_libraries_are_like_ours() -> None:
    """They named no node, and among lines of JSON they were none: asyncio's came with a traceback of many lines."""
    first, second, third = map(json.loads, run("json", terminal=False, program=OF_LIBRARIES).splitlines())
    assert {line["local_node"] for line in (first, second, third)} == {"01234567"}
    assert (first["event"], first["level"]) == ("first \x1b[2Jof two\nlines", "warning")
    assert (second["library"], second["level"]) == ("library", "warning")
    assert (third["library"], third["level"]) == ("asyncio", "error")
    assert "nobody asks" in third["exception"]
    told = run("text", terminal=False, program=OF_LIBRARIES)
    assert told.count("local_node=01234567") == 3 and "\x1b" not in told

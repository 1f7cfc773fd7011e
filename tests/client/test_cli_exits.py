"""How a command ends: each kind of error has its exit code and one line; a reader that has left is no error. No cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stele.cli.errors import BUG, DISK, INTERRUPTED, OK, REFUSED, TRY_AGAIN

COMMAND = """
import errno, sys, click
from stele.cli import app
from stele.model.errors import Code, Corrupt, Rejected, Retryable

def end():
    {body}

app.cli.add_command(click.Command("end", callback=end))
app.run(["end"])
"""
ENDS = [
    ("return", OK, ""),
    ("raise Rejected('no such table')", REFUSED, "stele: INVALID_ARGUMENT: no such table"),
    ("raise Retryable('nobody leads', code=Code.NO_QUORUM)", TRY_AGAIN, "stele: NO_QUORUM: nobody leads"),
    ("raise Corrupt('a byte has changed')", DISK, "stele: CORRUPT: a byte has changed"),
    ("raise OSError(errno.ENOSPC, 'No space left', 'f.csv')", TRY_AGAIN, "stele: f.csv: No space left"),
    ("raise OSError(errno.EDQUOT, 'Quota exceeded', 'f.csv')", TRY_AGAIN, "stele: f.csv: Quota exceeded"),
    ("raise OSError(errno.EACCES, 'Permission denied', 'f.csv')", REFUSED, "stele: f.csv: Permission denied"),
    ("return 1 // 0", BUG, "stele: this is a bug in Stele; please report it with the lines above"),
    ("raise KeyboardInterrupt", INTERRUPTED, ""),
]


def started(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND.format(body=body)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(("body", "code", "line"), ENDS)
def test_each_kind_of_error_has_its_exit_code_and_its_line(body: str, code: int, line: str) -> None:
    process = started(body)
    out, err = process.communicate(timeout=60)
    told = err.strip().splitlines()
    assert (process.returncode, out) == (code, "")
    assert told[-1:] == ([line] if line else [])
    assert len(told) <= 1 or code == BUG


LEFT = """[sys.stdout.write('a row\\n'), sys.stdout.flush(), sys.stdin.read(), sys.stdout.write('another')]"""


@pytest.mark.parametrize("rest", ["", " * 1_000_000"], ids=["little is left", "much is left"])
def test_a_reader_that_leaves_ends_a_command_without_a_word(rest: str) -> None:
    """Also where the interpreter would try to write the rest once more as it ends."""
    process = started(LEFT.replace("'another'", f"'another'{rest}"))
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "a row\n"
    process.stdout.close()
    process.stdin.close()
    assert (process.stderr.read(), process.wait(60)) == ("", OK)
    process.stderr.close()

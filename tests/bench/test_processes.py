"""The servers of peers: started, ended, told of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.processes import Servers, resident_bytes


def test_servers_run_until_they_are_stopped(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.start("one", ["sleep", "60"], {})
    servers.start("two", ["sleep", "60"], {})
    assert servers.ended() == ""
    assert servers.resident_bytes("one") > 0
    servers.stop()
    assert servers.ended().startswith("one ended with -9")


def test_one_that_ends_by_itself_is_told_with_its_last_line(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.start("bad", ["sh", "-c", "echo some; echo $WORDS; exit 3"], {"WORDS": "last words"})
    deadline = time.monotonic() + 60
    while not servers.ended() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert servers.ended() == "bad ended with 3: last words"
    servers.stop()


def test_memory_of_a_process_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it has ended"):
        resident_bytes(2**22 + 1)  # above the largest id that Linux gives

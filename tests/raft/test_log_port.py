"""The log in memory passes the contract that the real one passes."""

from __future__ import annotations

import random

import pytest

from tests.raft.log_port_contract import LogPortContract, LogUnderTest
from tests.raft.memory_log import MemoryLog


class _Logs:
    def __init__(self) -> None:
        self._log = MemoryLog()

    def open(self) -> MemoryLog:
        return self._log

    def settle(self) -> None:
        self._log.sync(self._log.pending)

    def close(self) -> None:
        self.settle()

    def crash(self) -> None:
        self._log.crash(random.Random(1))


class TestMemoryLog(LogPortContract):
    @pytest.fixture
    def logs(self) -> LogUnderTest:
        return _Logs()

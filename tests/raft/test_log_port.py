"""The simulator's log passes the contract that the real one passes."""

from __future__ import annotations

import random

import pytest

from tests.raft.log_port_contract import LogPortContract, LogUnderTest
from tests.sim.disk import SimLog


class _Logs:
    def __init__(self) -> None:
        self._log = SimLog()

    def open(self) -> SimLog:
        return self._log

    def settle(self) -> None:
        self._log.sync(self._log.pending)

    def close(self) -> None:
        self.settle()

    def crash(self) -> None:
        self._log.crash(random.Random(1))


class TestSimLog(LogPortContract):
    @pytest.fixture
    def logs(self) -> LogUnderTest:
        return _Logs()

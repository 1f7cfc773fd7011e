"""The real log passes the contract of the log port, on real files and on files that lose what was not synced."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stele.wal import Log, StreamLog
from tests.raft.log_port_contract import LogPortContract, LogUnderTest
from tests.wal.simfs import SimFiles
from tests.wal.support import NODE, SMALL, open_log, run_all, settle, stream_of


class _Logs:
    def __init__(self) -> None:
        self.files = SimFiles()
        self.log: Log | None = None
        self._rng = random.Random(7)

    def _open(self) -> Log:
        return open_log(self.files)

    def open(self) -> StreamLog:
        if self.log is not None:
            self.log.close()
        self.log = self._open()
        assert not self.log.recovery.failed
        stream = stream_of(self.log)
        settle(self.log)
        return stream

    def settle(self) -> None:
        assert self.log is not None
        settle(self.log)

    def close(self) -> None:
        assert self.log is not None
        self.log.close()

    def crash(self) -> None:
        assert self.log is not None
        self.files = self.files.crash(self._rng)
        self.log.close()


class _RealLogs(_Logs):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def _open(self) -> Log:
        return Log.open(self._directory / "wal", replace(SMALL, prepare=True), NODE, run_all)

    def crash(self) -> None:
        self.close()


class TestOnFilesThatForget(LogPortContract):
    @pytest.fixture
    def logs(self) -> LogUnderTest:
        return _Logs()


class TestOnRealFiles(LogPortContract):
    @pytest.fixture
    def logs(self, tmp_path: Path) -> LogUnderTest:
        return _RealLogs(tmp_path)

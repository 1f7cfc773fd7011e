"""The real log passes the contract of the log port, on real files and on files that lose what was not synced.

Each time with its thread alone, and with an event loop that writes small batches itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from stele.wal import Log, StreamLog
from stele.wal.aio import kernel_sync
from tests.raft.log_port_contract import LogPortContract, LogUnderTest
from tests.wal.simfs import SimFiles
from tests.wal.support import NODE, SMALL, LoopSide, open_log, run_all, settle, stream_of


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
        self._settle(self.log)
        return stream

    def settle(self) -> None:
        assert self.log is not None
        self._settle(self.log)

    def _settle(self, log: Log) -> None:
        settle(log)

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


class _LoopLogs(_Logs):
    def _open(self) -> Log:
        log = super()._open()
        self._side = LoopSide(log)
        return log

    def _settle(self, log: Log) -> None:
        self._side.settle()


class _RealLoopLogs(_RealLogs):
    """The loop runs only while the log settles: at other times, the end among them, it stands still."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.loop = uvloop.new_event_loop()

    def _open(self) -> Log:
        log = Log.open(self._directory / "wal", replace(SMALL, prepare=True), NODE, self._dispatch)
        log.attach(self.loop, kernel_sync(self._directory))
        return log

    def _dispatch(self, callbacks: list[Callable[[], None]]) -> None:
        self.loop.call_soon_threadsafe(run_all, callbacks)

    def _settle(self, log: Log) -> None:
        done = self.loop.create_future()
        log.sync(lambda: done.set_result(None))
        self.loop.run_until_complete(asyncio.wait_for(done, 60))


class TestOnFilesThatForget(LogPortContract):
    @pytest.fixture
    def logs(self) -> LogUnderTest:
        return _Logs()


class TestOnRealFiles(LogPortContract):
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Iterator[LogUnderTest]:
        logs = _RealLogs(tmp_path)
        yield logs
        logs.close()


class TestOnFilesThatForgetWithALoop(LogPortContract):
    @pytest.fixture
    def logs(self) -> LogUnderTest:
        return _LoopLogs()


class TestOnRealFilesWithALoop(LogPortContract):
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Iterator[LogUnderTest]:
        logs = _RealLoopLogs(tmp_path)
        yield logs
        logs.close()
        logs.loop.close()

"""Kernel AIO itself, and the log on it: real files, real loops."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import uvloop

from stele.model.errors import InvariantViolation
from stele.wal import Log, aio
from stele.wal.aio import KernelSync, kernel_sync
from stele.wal.append_queue import Writer
from stele.wal.files import OsFile, OsFiles
from tests.wal.simfs import SimFiles
from tests.wal.support import NODE, SMALL, entry, key, loaded, run_all, stream_of

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def _available() -> bool:
    found = kernel_sync(Path(tempfile.gettempdir()))
    if found is not None:
        found.close()
    return found is not None


needs_aio = pytest.mark.skipif(not _available(), reason="no kernel AIO here")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OsFile]:
    file = OsFiles().create(tmp_path / "file")
    assert isinstance(file, OsFile)
    file.write([b"x" * 5000], 0)
    yield file
    file.close()


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = LOOPS[request.param]()
    yield loop
    loop.close()


_TIMES = 20


def _gives_back(work: Callable[[], None]) -> None:
    """What it leaves open it leaves each time; threads of earlier tests may open and close something meanwhile."""
    before = _descriptors(), _contexts()
    for _ in range(_TIMES):
        work()
    after = _descriptors(), _contexts()
    assert all(now - then < _TIMES for now, then in zip(after, before)), (before, after)


def _contexts() -> int:
    return Path("/proc/self/maps").read_text().count("[aio]")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- the port


@needs_aio
def test_the_loop_is_told_when_a_sync_has_ended(file: OsFile, loop: asyncio.AbstractEventLoop) -> None:
    def work() -> None:
        sync = KernelSync()
        told: list[bool] = []

        async def main() -> None:
            for number in range(1, 4):
                file.write([b"y" * 600], number * 600)
                sync.begin(file)
                async with asyncio.timeout(60):
                    while len(told) < number:
                        await asyncio.sleep(0.001)

        sync.watch(loop, lambda: told.append(sync.ended()))
        loop.run_until_complete(main())
        assert told == [True] * 3
        sync.close()
        sync.close()

    _gives_back(work)


@needs_aio
def test_a_sync_can_be_waited_for_without_a_loop(file: OsFile) -> None:
    sync = KernelSync()
    for _ in range(3):
        sync.begin(file)
        sync.wait()
    sync.close()


@needs_aio
def test_close_waits_for_what_is_under_way(file: OsFile) -> None:
    def work() -> None:
        sync = KernelSync()
        sync.begin(file)
        sync.close()

    _gives_back(work)


@needs_aio
def test_closed_in_another_thread_the_loop_gives_the_eventfd_back(
    file: OsFile, loop: asyncio.AbstractEventLoop
) -> None:
    loop.run_until_complete(asyncio.sleep(0))  # what it opens when it first runs

    def work() -> None:
        sync = KernelSync()
        told: list[int] = []
        sync.watch(loop, lambda: told.append(1))
        sync.begin(file)
        thread = threading.Thread(target=sync.close)
        thread.start()
        thread.join()
        loop.run_until_complete(asyncio.sleep(0.01))
        assert told == []

    _gives_back(work)


@needs_aio
def test_closed_after_its_loop(file: OsFile) -> None:
    def work() -> None:
        loop = uvloop.new_event_loop()
        sync = KernelSync()
        sync.watch(loop, lambda: None)
        loop.close()
        thread = threading.Thread(target=sync.close)
        thread.start()
        thread.join()

    _gives_back(work)


@needs_aio
def test_what_cannot_be_synced_is_refused(file: OsFile) -> None:
    sync = KernelSync()
    reading, writing = os.pipe()
    with pytest.raises(OSError):
        sync.begin(OsFile(writing))
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError):
        sync.begin(OsFile(writing))
    with pytest.raises(InvariantViolation):
        sync.begin(SimFiles().create(Path("file")))
    assert not sync.ended()
    sync.begin(file)
    sync.wait()
    sync.close()


@needs_aio
def test_a_result_in_the_ring_is_taken_once_and_its_error_is_told(file: OsFile) -> None:
    sync = KernelSync()
    sync.begin(file)
    assert sync.readable_within(60)
    assert sync.ended() and not sync.ended()
    sync._results[sync._ring.tail].result = -errno.EIO  # as the kernel tells of a sync that failed
    sync._ring.tail += 1
    with pytest.raises(OSError) as told:
        sync.ended()
    assert told.value.errno == errno.EIO
    assert not sync.ended()
    sync.close()
    with pytest.raises(InvariantViolation):
        sync.ended()


@pytest.mark.parametrize("why", ["switch", "machine", "kernel", "ring", "submit"])
def test_where_there_is_none_one_line_says_so(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = 9999  # no system call: refused, as by a container's profile
    if why == "switch":
        monkeypatch.setenv(aio.SWITCH, "off")
    elif why == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    elif why == "kernel":
        monkeypatch.setattr(aio, "_NUMBERS", {platform.machine(): (unknown,) * 4})
    elif why == "ring":
        monkeypatch.setattr(aio, "_RING_MAGIC", 77)
    else:
        monkeypatch.setattr(aio, "_FDSYNC", 77)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))

    def work() -> None:
        with structlog.testing.capture_logs() as lines:
            assert kernel_sync(tmp_path) is None
        assert [line["log_level"] for line in lines] == ["info"]

    _gives_back(work)
    assert os.listdir(tmp_path) == []


# --- the log on it


class _Node:
    """A log as a node has it, for one run of a loop."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop, *, with_aio: bool = True) -> None:
        self.loop = loop
        options = replace(SMALL, segment_bytes=1 << 20, prepare=True, keeper_interval_ms=5)
        self.log = Log.open(directory / "wal", options, NODE, self._dispatch)
        # A clock that stands still: however slow the disk is just now, small batches are the loop's.
        self.log.attach(loop, kernel_sync(directory) if with_aio else None, clock=lambda: 0.0)
        self.order: list[int] = []

    def _dispatch(self, callbacks: list[Callable[[], None]]) -> None:
        self.loop.call_soon_threadsafe(run_all, callbacks)

    async def has_room(self) -> None:
        """Wait until the next segment is made: without one it is the thread that writes past the end of this one."""
        while self.log.shared.wanted_sequence() is not None:
            await asyncio.sleep(0.001)

    def append(self, payload: bytes) -> asyncio.Future[None]:
        stream = stream_of(self.log)
        index = stream.last_opid.index + 1
        future = self.loop.create_future()

        def done() -> None:
            self.order.append(index)
            future.set_result(None)

        stream.append_entries((entry(1, index, payload),), done)
        return future


@pytest.mark.parametrize("with_aio", [pytest.param(True, marks=needs_aio), False])
def test_bursts_of_any_size_come_back_in_order(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, with_aio: bool
) -> None:
    node = _Node(tmp_path, loop, with_aio=with_aio)
    rng = random.Random(5)
    sizes = [rng.choice((0, 10, 600, 600, 600, 5000, 100_000)) for _ in range(300)]

    async def caller(mine: list[int]) -> None:
        for size in mine:
            await node.has_room()
            await node.append(b"x" * size)

    async def main() -> None:
        await caller(sizes[:50])
        await asyncio.gather(*(caller(sizes[50 + n :: 8]) for n in range(8)))

    loop.run_until_complete(main())
    count = len(node.order)
    assert node.order == list(range(1, count + 1)) and count == 300
    assert (node.log.stats.loop_batches > 20) == with_aio
    assert node.log.stats.batches > node.log.stats.loop_batches
    node.log.close()
    again = Log.open(tmp_path / "wal", SMALL, NODE, run_all)
    assert len(loaded(again.stream(key())).entries) == 300
    again.close()


@needs_aio
@pytest.mark.parametrize("how", ["in a thread", "in the loop's thread", "after the loop"])
def test_close_with_a_sync_under_way(tmp_path: Path, how: str) -> None:
    contexts = _contexts()
    loop = uvloop.new_event_loop()
    node = _Node(tmp_path, loop)

    async def main() -> None:
        await node.append(b"first")
        waiting = node.append(b"second"), node.append(b"third")
        while node.log.shared.append_queue.writer is not Writer.KERNEL and not waiting[0].done():
            await asyncio.sleep(0)
        if how == "in a thread":
            await loop.run_in_executor(None, node.log.close)
            await asyncio.gather(*waiting)
        elif how == "in the loop's thread":
            node.log.close()
            await asyncio.gather(*waiting)

    loop.run_until_complete(main())
    if how == "after the loop":
        node.log.shared.dispatch = lambda callbacks: None
        loop.close()
        node.log.close()
    else:
        assert node.order == [1, 2, 3]
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    assert _contexts() <= contexts
    again = Log.open(tmp_path / "wal", SMALL, NODE, run_all)
    assert len(loaded(again.stream(key())).entries) == 3
    again.close()

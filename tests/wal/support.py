"""What the log's tests share: one node, one stream, a log on a file system that can lose power."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stele.model.config import Configuration, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, NodeId, ReplicaId, StreamKey, TabletId
from stele.raft.ports import LoadedLog, fold_records
from stele.wal import Log, LogOptions, StreamLog, loop_writer
from tests.wal.simfs import SimFiles, SimLoop, SimSync

NODE = NodeId("ab" * 16)
DIRECTORY = Path("wal")
CONFIG = Configuration(
    -1, tuple(Peer(NodeId(f"{n:032x}"), ReplicaId(n), f"10.0.0.{n}:7050") for n in (1, 2, 3))
)
SMALL = LogOptions(segment_bytes=16 << 10, low_space_bytes=0, prepare=False)
ROOMY = replace(SMALL, segment_bytes=1 << 20)
WAIT_S = 60.0
"""For what comes at once, on a machine that stands still for seconds."""
LARGE = b"x" * (loop_writer.LOOP_BYTES_MAX + 1)


def key(tablet: int = 1, replica: int = 1) -> StreamKey:
    return StreamKey(TabletId(f"{tablet:032x}"), ReplicaId(replica))


def run_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def open_log(files: SimFiles, options: LogOptions = SMALL) -> Log:
    return Log.open(DIRECTORY, options, NODE, run_all, files=files)


def open_still(files: SimFiles, options: LogOptions = SMALL) -> Log:
    """A log without threads: it writes within `turn`, so a test decides when."""
    return Log.open(DIRECTORY, options, NODE, run_all, files=files, threads=False)


class LoopSide:
    """A log's event loop and background sync, both simulated: the test says what happens when."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.loop = SimLoop()
        self.sync = SimSync()
        self.now = 0.0
        log.attach(self.loop, self.sync, clock=lambda: self.now)

    def end(self) -> None:
        """The sync under way ends, and the loop is told."""
        self.sync.end()
        self.sync.tell()

    def run(self) -> None:
        """Turns of the loop, and ends of syncs, until neither is left."""
        while self.loop.waiting or self.sync.under_way:
            self.loop.turn()
            if self.sync.under_way:
                self.end()

    def settle(self) -> None:
        """As `settle`, for a log with a thread, within the loop's thread."""
        done: list[int] = []
        self.log.sync(lambda: done.append(1))
        give_up = time.monotonic() + WAIT_S
        while not done:
            assert time.monotonic() < give_up, self.log.failed
            time.sleep(0.001)  # the log's thread has it
            self.run()


def settle(log: Log) -> None:
    done = threading.Event()
    log.sync(done.set)
    assert done.wait(WAIT_S), log.failed


def entry(term: int, index: int, payload: bytes = b"") -> Entry:
    return Entry(term, index, EntryKind.WRITE, index << 12, payload or f"{term}.{index}".encode())


def entries(*opids: tuple[int, int]) -> tuple[Entry, ...]:
    return tuple(entry(term, index) for term, index in opids)


def stream_of(log: Log, name: StreamKey | None = None) -> StreamLog:
    """The stream, made if it is not there."""
    name = name or key()
    if name in log.shared.states:
        return log.stream(name)
    return log.create_stream(name, OPID_NONE, CONFIG)


def loaded(stream: StreamLog) -> LoadedLog:
    return fold_records(stream.load())


def power_cut(log: Log, files: SimFiles, rng: random.Random | None = None) -> SimFiles:
    """The power goes; what the next boot finds."""
    after = files.crash(rng or random.Random(1))
    log.close()
    return after


def fill(log: Log, count: int, size: int = 1000, *, stream: int = 1) -> None:
    """Append `count` entries of `size` bytes, a turn each."""
    s = stream_of(log, key(stream))
    for _ in range(count):
        s.append_entries((entry(1, s.last_opid.index + 1, b"x" * size),))
        log.turn()


def until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < give_up, "it does not come"
        time.sleep(0.001)


def still(options: LogOptions = ROOMY) -> tuple[SimFiles, Log, LoopSide]:
    """A log without a thread of its own, settled, with a loop."""
    files = SimFiles()
    log = open_still(files, options)
    stream_of(log)
    log.turn()
    return files, log, LoopSide(log)


class Appends:
    """Appends numbered entries to a log's stream, and notes whose callbacks came."""

    def __init__(self, log: Log) -> None:
        self.stream = log.stream(key())
        self.done: list[int] = []

    def __call__(self, payload: bytes = b"", then: Callable[[], None] = lambda: None) -> int:
        index = self.stream.last_opid.index + 1

        def done() -> None:
            self.done.append(index)
            then()

        self.stream.append_entries((entry(1, index, payload),), done)
        return index

"""The transfer of files alone: damage on the way and on the disk, rates, disks that are full, sources that leave."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import google_crc32c
import pytest

from stele.consensus import fetch
from stele.consensus.copy_source import CopyFile, SessionInfo
from stele.consensus.fetch import Fetcher, RateLimit
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.model.ids import OpId, ReplicaId, TabletId
from stele.tablet.checksums import RangeSums, SumsInside

FILES = {"big": os.urandom(300_001), "small": b"x", "empty": b"", "last": os.urandom(1 << 16)}
WITH_SUMS = {"big"}
FRAME = 10_000


class Frames:
    """CopyFrames of FILES, after what the test does to them."""

    def __init__(self, source: Source, name: str, offset: int, length: int) -> None:
        self.source, self.name, self.offset, self.length = source, name, offset, length
        self.woken = Event()

    def cancel(self) -> None:
        self.source.cancelled += 1
        self.woken.set()

    def __iter__(self) -> Iterator[tuple[int, bytes, int]]:
        self.source.asked.append((self.name, self.offset, self.length))
        for at in range(self.offset, self.offset + self.length, FRAME):
            data = FILES[self.name][at : min(at + FRAME, self.offset + self.length)]
            frame = self.source.change(self.name, at, data, google_crc32c.value(data))
            if frame is None:
                return
            yield frame
            if self.source.silent:
                self.woken.wait()


class Source:
    """CopySource."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.cancelled = 0
        self.lost = False
        self.silent = False
        self.change: Callable[[str, int, bytes, int], tuple[int, bytes, int] | None] = lambda _name, *frame: (
            frame
        )
        """What a frame becomes; None: nothing comes any more."""

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        raise NotImplementedError

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> Frames:
        return Frames(self, name, offset, length)

    async def keep_alive(self, session_id: str) -> int:
        if self.lost:
            raise Rejected("no such session", code=Code.NOT_FOUND)
        return 1000

    async def end(self, session_id: str, success: bool, damage: str) -> None: ...


class Session:
    """What of a SessionInfo a Fetcher looks at."""

    session_id = "s"
    files = tuple(CopyFile(name, len(data)) for name, data in FILES.items())


def sums_inside(name: str, size: int, read: Callable[[int, int], bytes]) -> RangeSums | None:
    """Ranges over the borders of frames, pieces and chunks; the file ends with what tells of them, which has none."""
    if name not in WITH_SUMS:
        return None
    assert read(size - 1000, 1000) == FILES[name][-1000:]
    borders = range(64, size - 1000, 23_456)
    return RangeSums(
        name, [(a, b, google_crc32c.value(FILES[name][a:b])) for a, b in itertools.pairwise(borders)]
    )


async def bring(
    source: Source,
    directory: Path,
    rate: int = 0,
    progress: Callable[[int], None] = lambda size: None,
    sums: SumsInside = sums_inside,
) -> frozenset[str]:
    directory.mkdir(exist_ok=True)
    fetcher = Fetcher(source, directory, asyncio.to_thread, RateLimit(rate), progress, sums)
    session: Any = Session()
    return await fetcher.fetch(session)


async def failure(source: Source, directory: Path) -> SteleError:
    with pytest.raises(SteleError) as caught:
        await bring(source, directory)
    return caught.value


def here(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and pieces of which even small files have several."""
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 64_000)
    monkeypatch.setattr(fetch, "_PIECE_BYTES", 15_000)
    monkeypatch.setattr(fetch, "_RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(fetch, "_RETRY_MAX_S", 0.001)


class Passing:
    """The loop's time: as much as really passes, and what is said to. To sleep takes no longer than to say so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop, self.said_s = asyncio.get_running_loop(), 0.0
        clock = loop.time
        patch.setattr(loop, "time", lambda: clock() + self.said_s)
        patch.setattr(asyncio, "sleep", self.sleep)

    def say(self, seconds: float) -> None:
        self.said_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.say(seconds)


async def test_files_arrive_and_what_is_here_is_kept(tmp_path: Path) -> None:
    """The last of a session is brought always: another checkpoint of the source has other bytes under its name."""
    source, counted = Source(), list[int]()
    (tmp_path / "stray").write_bytes(b"of an earlier session")
    assert await bring(source, tmp_path, progress=counted.append) == WITH_SUMS
    assert here(tmp_path) == FILES
    assert sum(counted) == sum(map(len, FILES.values()))
    (tmp_path / "small").unlink()
    (tmp_path / "last").write_bytes(bytes(1 << 16))
    source.asked.clear()
    counted.clear()
    assert await bring(source, tmp_path, progress=counted.append) == set()
    assert here(tmp_path) == FILES
    assert {name for name, _, _ in source.asked} == {"small", "last"}
    assert sum(counted) == sum(map(len, FILES.values()))


async def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    source = Source()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "last" and at == FRAME:  # of the first chunk, whose first frame is written by then
            raise Corrupt("the source's replica is damaged")
        return at, data, crc

    source.change = change
    assert (await failure(source, tmp_path)).code is Code.CORRUPT
    assert "last" not in here(tmp_path) and here(tmp_path)["last.part"][:FRAME] == FILES["last"][:FRAME]
    again = Source()
    whole = set(FILES) & set(here(tmp_path))
    await bring(again, tmp_path)
    assert here(tmp_path) == FILES
    assert whole.isdisjoint(name for name, _, _ in again.asked)


@pytest.mark.parametrize("what", ["flipped", "elsewhere", "longer", "ended", "broken"])
async def test_a_frame_that_arrives_damaged_is_fetched_again_from_there(tmp_path: Path, what: str) -> None:
    source, left = Source(), [64_000, 64_000 + 2 * FRAME, 128_000]

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int] | None:
        if name != "big" or at not in left:
            return at, data, crc
        left.remove(at)
        match what:
            case "ended":
                return None
            case "flipped":
                return at, bytes([data[0] ^ 1]) + data[1:], crc
            case "elsewhere":
                return at + FRAME, data, crc
            case "longer":
                return at, bytes(70_000), google_crc32c.value(bytes(70_000))
        raise Retryable("the connection broke")

    source.change = change
    await bring(source, tmp_path)
    assert here(tmp_path) == FILES and not left
    assert ("big", 64_000 + 2 * FRAME, 64_000 - 2 * FRAME) in source.asked


@pytest.mark.parametrize("at", [64, 23_519, 64_000, 149_999, 280_000])
async def test_bytes_that_were_rotten_at_their_source_are_found_before_the_file_is_whole(
    tmp_path: Path, at: int
) -> None:
    """Each frame's checksum is right, since it was made of what was read."""
    source = Source()

    def change(name: str, offset: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "big" and offset <= at < offset + len(data):
            data = data[: at - offset] + bytes([data[at - offset] ^ 16]) + data[at - offset + 1 :]
        return offset, data, google_crc32c.value(data)

    source.change = change
    error = await failure(source, tmp_path)
    assert isinstance(error, Corrupt) and "big: bytes " in str(error)
    assert "big" not in here(tmp_path)


async def test_what_the_file_gives_back_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def lying(fd: int, data: memoryview, at: int) -> int:
        return write(fd, bytes([data[0] ^ 1]) + bytes(data[1:]) if at == 94_000 else data, at)

    monkeypatch.setattr(os, "pwrite", lying)
    assert isinstance(await failure(Source(), tmp_path), Corrupt)


async def test_a_footer_that_does_not_come_is_asked_for_again(tmp_path: Path) -> None:
    source, broken = Source(), [3]

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "big" and len(data) == 1000 and broken[0]:
            broken[0] -= 1
            raise Retryable("the connection broke")
        return at, data, crc

    source.change = change
    assert await bring(source, tmp_path) == WITH_SUMS
    assert here(tmp_path) == FILES and not broken[0]


async def test_footers_that_come_keep_a_source_from_being_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as bytes that come, and the time they took is not held against what comes after them."""
    passing, source, broken = Passing(monkeypatch), Source(), set[str]()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        part = "footer" if at == 0 and len(data) == 1 else "bytes"
        if name == "big" and part not in broken and (part == "bytes" or footers > 6):
            broken.add(part)
            raise Retryable("the connection broke")
        return at, data, crc

    footers = 0

    def slow(name: str, size: int, read: Callable[[int, int], bytes]) -> RangeSums | None:
        nonlocal footers
        if name != "big":
            return None
        for _ in range(8):
            passing.say(fetch.SILENT_MAX_S / 6)
            footers += 1
            read(0, 1)
        passing.say(1.2 * fetch.SILENT_MAX_S)
        return None

    source.change = change
    await bring(source, tmp_path, sums=slow)
    assert here(tmp_path) == FILES and broken == {"footer", "bytes"}


async def test_a_part_that_fails_each_time_is_asked_for_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while others come."""
    monkeypatch.setattr(fetch, "SILENT_MAX_S", 0.2)
    monkeypatch.setattr(fetch, "_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(fetch, "_RETRY_MAX_S", 100.0)
    source = Source()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "small":
            raise Retryable("THROTTLED")
        if name == "big":
            time.sleep(0.03)
        return at, data, crc

    source.change = change
    assert "no byte of small" in str(await failure(source, tmp_path))
    assert len([name for name, _, _ in source.asked if name == "small"]) < 10


@pytest.mark.parametrize("end", [300_000, 300_500], ids=["inside", "beyond"])
async def test_only_a_file_all_of_whose_ranges_were_compared_is_told(tmp_path: Path, end: int) -> None:
    def sums(name: str, size: int, read: Callable[[int, int], bytes]) -> RangeSums | None:
        return (
            RangeSums(name, [(64, end, google_crc32c.value(FILES[name][64:end]))]) if name == "big" else None
        )

    assert await bring(Source(), tmp_path, sums=sums) == ({"big"} if end < 300_001 else set())
    assert here(tmp_path) == FILES


async def test_what_cannot_be_synced_ends_it_before_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(fd: int) -> None:
        if os.fstat(fd).st_size:  # an empty file is there before anything is asked for
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "fdatasync", none)
    source = Source()
    assert "Cannot allocate memory" in str(await failure(source, tmp_path))
    assert len(source.asked) <= 2 * fetch.CHUNKS_AT_ONCE


async def test_short_writes_go_on_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:4096], at))
    await bring(Source(), tmp_path)
    assert here(tmp_path) == FILES


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
async def test_a_full_disk_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    assert (await failure(Source(), tmp_path)).code is Code.DISK_FULL


async def test_a_session_that_was_lost_is_not_asked_for_again_and_again(tmp_path: Path) -> None:
    source = Source()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        raise Retryable("connection refused")

    source.change, source.lost = change, True
    assert (await failure(source, tmp_path)).code is Code.NOT_FOUND
    assert len(source.asked) <= fetch.CHUNKS_AT_ONCE


async def test_a_source_that_gives_nothing_is_given_up_and_what_came_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries were counted, and each may take as long as a stream may be silent: ten minutes for a source that hung."""
    monkeypatch.setattr(fetch, "_RETRY_FIRST_S", 1.0)
    monkeypatch.setattr(fetch, "_RETRY_MAX_S", 10.0)
    passing, source, others = Passing(monkeypatch), Source(), {"big", "small", "empty"}

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "last":
            while not others < {path.name for path in tmp_path.iterdir()}:
                time.sleep(0.01)
            raise Retryable("connection refused")
        return at, data, crc

    source.change = change
    error = await failure(source, tmp_path)
    assert fetch.SILENT_MAX_S / 2 < passing.said_s < 2 * fetch.SILENT_MAX_S
    assert isinstance(error, Retryable) and "no byte of last" in str(error) and "refused" in str(error)
    assert others < here(tmp_path).keys()


async def test_a_source_that_gives_some_bytes_in_time_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_RETRY_FIRST_S", fetch.SILENT_MAX_S / 3)
    monkeypatch.setattr(fetch, "_RETRY_MAX_S", fetch.SILENT_MAX_S / 3)
    passing, source, broken = Passing(monkeypatch), Source(), set[int]()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "last" and at not in broken:
            broken.add(at)
            raise Retryable("the connection broke")
        return at, data, crc

    source.change = change
    await bring(source, tmp_path)
    assert here(tmp_path) == FILES and passing.said_s > fetch.SILENT_MAX_S


@pytest.mark.parametrize("during", ["bytes", "footers"])
async def test_once_cancelled_it_touches_nothing_any_more(tmp_path: Path, during: str) -> None:
    source = Source()
    source.silent = True
    sums: SumsInside = sums_inside if during == "footers" else lambda name, size, read: None
    under_way = 1 if during == "footers" else fetch.CHUNKS_AT_ONCE
    task = asyncio.create_task(bring(source, tmp_path, sums=sums))
    while len(source.asked) < under_way:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and source.cancelled == under_way
    before = here(tmp_path)
    await asyncio.sleep(0.05)
    assert here(tmp_path) == before


async def test_a_slow_copy_asks_for_no_less_than_is_worth_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk was what a second lets through, however little: of 1 byte a second, each byte was a chunk, all made at once."""
    assert RateLimit(1).at_once(32 << 20) == fetch.CHUNK_BYTES_MIN
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    source = Source()
    await bring(source, tmp_path, rate=1000)
    assert here(tmp_path) == FILES
    assert len([name for name, _, length in source.asked if name == "big"]) == 6  # 5 chunks and a footer
    assert sum(map(len, FILES.values())) / 1000 - 66 < max(waits) < 400  # and it is no faster


async def test_chunks_are_made_when_it_is_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 1 << 30)
    landing = fetch._Landing(CopyFile("huge", 1 << 50), tmp_path)
    rate, least = RateLimit(1), fetch.CHUNK_BYTES_MIN
    chunks = fetch._chunks_of([landing], rate)
    first, second = next(chunks), next(chunks)
    rate.change(4 * least)
    third = next(chunks)
    assert (first.at, first.end, second.at, second.end) == (0, least, least, 2 * least)
    assert (third.at, third.end) == (2 * least, 6 * least)


async def test_to_wait_for_the_rate_limit_is_no_silence_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Passing(monkeypatch)
    source, broken = Source(), list[int]()

    def change(name: str, at: int, data: bytes, crc: int) -> tuple[int, bytes, int]:
        if name == "big" and at == 128_000 and not broken:
            broken.append(at)
            raise Retryable("the connection broke")
        return at, data, crc

    source.change = change
    await bring(source, tmp_path, rate=1000)  # 64 s for each chunk, and SILENT_MAX_S is 30
    assert here(tmp_path) == FILES and broken


async def test_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1_000.0)
    unbounded, bounded = RateLimit(0), RateLimit(1000)
    assert (unbounded.at_once(1 << 20), bounded.at_once(5000), RateLimit(70_000).at_once(1 << 20)) == (
        1 << 20,
        5000,
        70_000,
    )
    for _ in range(4):
        await unbounded.take(1 << 30)
        await bounded.take(1000)
    # Nobody really slept, so each is told to wait for all before it.
    assert waits == [1, 2, 3]


@pytest.mark.parametrize("rate", [0, 1 << 40], ids=["no bounds", "more"])
async def test_who_waits_for_a_rate_waits_no_longer_once_it_is_another(rate: int) -> None:
    limit = RateLimit(1)
    await limit.take(1 << 40)
    waiting = [asyncio.ensure_future(limit.take(1 << 20)) for _ in range(2)]
    await asyncio.sleep(0)
    limit.change(1)
    await asyncio.sleep(0)
    assert not any(w.done() for w in waiting)
    limit.change(rate)
    await asyncio.gather(*waiting)
    await limit.take(1 << 20)

"""One feed of watches on a real key space, without a node: what is pushed when much comes at once, and how long a turn takes."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stele.consensus.applier import Applier
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Retryable
from stele.model.kvop import KeyOp, KeyOperation, encode_operations
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader, digest, encode
from stele.rpc.errors import error_from_pb
from stele.rpc.proto import tserver_pb2 as pb
from stele.tablet.keyspace import KeySpace
from stele.tserver import watching
from stele.tserver.watching import Feed, Watch
from tests.consensus.cluster import wait_until

TURN_MAX_S = 0.05
"""Far above what a turn takes, on a busy machine. What these tests did in one turn took seconds."""


class Reading:
    """A client's stream: it takes everything, unless the node has no memory for it."""

    def __init__(self) -> None:
        self.full = self.ended = False
        self.room = True
        self.pushes: list[pb.KvPushPB] = []

    def push(self, response: bytes) -> bool:
        if self.room:
            self.pushes.append(pb.ClientResponse.FromString(response).push)
        return self.room

    def seen(self, number: int) -> list[tuple[int, bytes]]:
        """(revision, key) of each change that a watch was told."""
        return [(c.revision, c.key) for p in self.pushes if p.number == number for c in p.changes]


def entry(index: int, *operations: KeyOperation) -> Entry:
    body = encode_operations(operations)
    header = WriteHeader(NO_CLIENT, 0, 0, 1, digest(body), kind=BodyKind.KEYSPACE)
    return Entry(1, index, EntryKind.WRITE, index << 12, encode(header, body))


def put(key: bytes, value: bytes = b"v") -> KeyOperation:
    return KeyOperation(KeyOp.REPLACE, key, value)


def feed_of(space: KeySpace) -> Feed:
    replica: Any = SimpleNamespace(term=1, tablet_id="7" * 32)
    return Feed(replica, space)


async def longest_turn() -> float:
    """The longest turn of the loop until it has nothing to do. A collection of all that other tests of this process left may
    take some tenths of a second, so there is none meanwhile."""
    longest, quiet = 0.0, 0
    gc.disable()
    try:
        while quiet < 20:
            began = time.thread_time()
            await asyncio.sleep(0)
            took = time.thread_time() - began
            longest, quiet = max(longest, took), 0 if took > 0.001 else quiet + 1
    finally:
        gc.enable()
    return longest


async def test_no_change_is_missed_when_a_large_write_is_applied_in_the_same_slice(tmp_path: Path) -> None:
    space, sink = KeySpace.create(tmp_path / "k"), Reading()
    feed = feed_of(space)
    feed.add(Watch(sink, 1, b"x", False, 0))
    await wait_until(lambda: not feed._behind)
    failed: list[BaseException] = []
    applier = Applier(slice_ms=1_000.0, in_thread=None, applied=lambda e, o: None, failed=failed.append)  # type: ignore[arg-type]
    applier.attach(space)
    applier.add((entry(1, put(b"x", b"new")), entry(2, put(b"big", bytes(6 << 20)))))
    await wait_until(lambda: space.revision == 2)
    feed.mark()
    await wait_until(lambda: sink.pushes[-1].revision == 2)
    assert sink.seen(1) == [(1, b"x")] and not failed


async def test_many_who_are_behind_are_served_one_turn_after_the_other(tmp_path: Path) -> None:
    space, sink = KeySpace.create(tmp_path / "k"), Reading()
    for n in range(1, 2_001):
        space.apply(entry(n, put(b"k%d" % (n % 50))))
    feed = feed_of(space)
    for number in range(300):
        feed.add(Watch(sink, number, b"k%d" % (number % 50), False, 0))
    assert await longest_turn() < TURN_MAX_S
    for number in range(300):
        assert sink.seen(number) == [(n, b"k%d" % (n % 50)) for n in range(1, 2_001) if n % 50 == number % 50]
    assert not feed._behind and not feed._turns


async def test_a_write_that_very_many_watch_is_pushed_over_several_turns_to_each_once(tmp_path: Path) -> None:
    space, sink = KeySpace.create(tmp_path / "k"), Reading()
    feed = feed_of(space)
    for number in range(8_000):
        feed.add(Watch(sink, number, b"k", number % 2 == 0, 0))
    await longest_turn()
    sink.pushes.clear()
    for n in range(1, 4):
        space.apply(entry(n, put(b"k"), put(b"other")))
        await asyncio.sleep(0)
    assert await longest_turn() < TURN_MAX_S
    told: dict[int, list[int]] = {}
    for push in sink.pushes:
        told.setdefault(push.number, []).extend(c.revision for c in push.changes)
    assert len(told) == 8_000 and all(revisions == [1, 2, 3] for revisions in told.values())
    sink.pushes.clear()
    feed.mark()
    assert await longest_turn() < TURN_MAX_S
    assert [p.revision for p in sink.pushes] == [3] * 8_000


async def test_a_client_without_room_gets_all_of_it_later(tmp_path: Path) -> None:
    space, sink = KeySpace.create(tmp_path / "k"), Reading()
    feed = feed_of(space)
    feed.add(Watch(sink, 1, b"", True, 0))
    await longest_turn()
    for attribute, without in (("room", False), ("full", True)):
        setattr(sink, attribute, without)
        begun = space.revision
        for n in range(begun + 1, begun + 4):
            space.apply(entry(n, put(b"a")))
            await asyncio.sleep(0)
        await longest_turn()
        assert len(sink.seen(1)) == begun and len(feed._behind) == 1
        setattr(sink, attribute, not without)
        feed.look()
        await longest_turn()
        assert [revision for revision, _ in sink.seen(1)] == list(range(1, begun + 4))


async def test_what_no_client_takes_at_once_ends_the_watch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client would break off, watch again behind the same revision, and get the same."""
    monkeypatch.setattr(watching, "_WRITE_BYTES_MAX", 3 << 20)
    space, sink = KeySpace.create(tmp_path / "k"), Reading()
    feed = feed_of(space)
    feed.add(Watch(sink, 1, b"", True, 0))
    await longest_turn()
    half = bytes(1 << 19)
    space.apply(entry(1, put(b"a", half)))
    space.apply(entry(2, *(put(b"b%d" % n, half) for n in range(5))))
    await longest_turn()
    assert [len(p.changes) for p in sink.pushes if p.changes] == [1, 5], (
        "two writes, which are too large for one message"
    )
    space.apply(entry(3, *(put(b"b%d" % n, half) for n in range(6))))
    await longest_turn()
    ended = error_from_pb(sink.pushes[-1].error)
    assert ended.code is Code.COMPACTED and "too large to be sent" in str(ended) and not len(feed)


async def test_watches_of_one_client_and_lengths_of_prefixes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "WATCHES_OF_CLIENT_MAX", 5)
    monkeypatch.setattr(watching, "LENGTHS_MAX", 3)
    feed = feed_of(KeySpace.create(tmp_path / "k"))
    sink, other = Reading(), Reading()
    for length in range(1, 4):
        feed.add(Watch(sink, length, b"p" * length, True, 0))
    with pytest.raises(Retryable, match="3 different lengths") as lengths:
        feed.check_room(Watch(sink, 4, b"pppp", True, 0))
    assert lengths.value.code is Code.THROTTLED
    for number in (4, 5):
        watch = Watch(sink, number, b"qqq"[: number - 2], True, 0)
        feed.check_room(watch)
        feed.add(watch)
    with pytest.raises(Retryable, match="this client has 5 watches"):
        feed.check_room(Watch(sink, 6, b"key", False, 0))
    feed.check_room(Watch(other, 1, b"pppp", False, 0))
    feed.remove((sink, 1))
    feed.check_room(Watch(sink, 6, b"key", False, 0))


async def test_a_fault_while_pushing_ends_the_watches_so_that_their_clients_ask_again(tmp_path: Path) -> None:
    class Broken(Reading):
        def push(self, response: bytes) -> bool:
            if pb.ClientResponse.FromString(response).push.changes:
                raise RuntimeError("broken")
            return super().push(response)

    space, sink, broken = KeySpace.create(tmp_path / "k"), Reading(), Broken()
    feed = feed_of(space)
    feed.add(Watch(broken, 1, b"a", False, 0))
    feed.add(Watch(sink, 1, b"a", False, 0))
    await longest_turn()
    space.apply(entry(1, put(b"a")))
    await longest_turn()
    assert not len(feed) and space.recent.reader is None
    assert error_from_pb(sink.pushes[-1].error).code is Code.NOT_LEADER

"""Whoever writes a log, the event loop or its thread, the same appends leave the same streams, also after power loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.ids import OpId, ReplicaId
from stele.raft.ports import LoadedLog
from stele.wal import Log, StreamLog
from stele.wal.loop_writer import LOOP_BYTES_MAX
from tests.wal.simfs import SimFiles
from tests.wal.support import (
    CONFIG,
    ROOMY,
    entry,
    key,
    loaded,
    open_still,
    power_cut,
    still,
    stream_of,
)

STREAMS = (1, 2)
SIZES = st.sampled_from([0, 1, 100, 5_000, LOOP_BYTES_MAX - 200, LOOP_BYTES_MAX + 1])
"""Empty entries, small ones, and those about the size that the loop leaves to the thread."""
APPEND = st.tuples(st.just("entries"), st.sampled_from(STREAMS), st.lists(SIZES, min_size=1, max_size=3))
OTHERS = st.tuples(
    st.sampled_from(["vote", "term", "cut", "snapshot"]), st.sampled_from(STREAMS), st.just(())
)
TURNS = st.lists(st.lists(APPEND | OTHERS, min_size=1, max_size=4), max_size=8)
"""What each turn of the event loop appends."""

Op = tuple[str, int, Sequence[int]]


def append(stream: StreamLog, op: Op, number: int, done: Callable[[], None]) -> None:
    """One call on the stream. Where there is nothing to cut it writes a term."""
    kind, _, sizes = op
    last = stream.last_opid.index
    if kind == "entries":
        stream.append_entries(
            [entry(1, last + n, b"x" * size) for n, size in enumerate(sizes, start=1)], done
        )
    elif kind == "vote":
        stream.append_vote(number, ReplicaId(2), done)
    elif kind == "cut" and last > stream.start.index:
        stream.pop_entries(last, done)
    elif kind == "snapshot" and last > stream.start.index:
        stream.end_snapshot(OpId(1, last), CONFIG, done)
    else:
        stream.append_term(number, done)


def write(log: Log, turns: Sequence[Sequence[Op]], settle: Callable[[], None]) -> list[int]:
    """Append it all, each turn settled; the order in which the callbacks came."""
    streams = {number: stream_of(log, key(number)) for number in STREAMS}
    settle()
    came: list[int] = []
    number = 0
    for turn in turns:
        for op in turn:
            number += 1
            append(streams[op[1]], op, number, lambda number=number: came.append(number))  # type: ignore[misc]
        settle()
    return came


def found(log: Log, files: SimFiles) -> tuple[list[LoadedLog], list[Any]]:
    """What the streams hold, and what they hold after the power went."""
    held = [loaded(log.stream(key(number))) for number in STREAMS]
    again = open_still(power_cut(log, files), ROOMY)
    after = [loaded(again.stream(key(number))) for number in STREAMS]
    again.close()
    return held, after


@settings(max_examples=40)
@given(TURNS)
def test_the_loop_and_the_thread_write_the_same(turns: list[list[Op]]) -> None:
    files, log, side = still()

    def by_loop() -> None:
        while log.shared.append_queue.items or side.sync.under_way:
            side.run()
            log.turn()  # what is not small is the thread's

    order = write(log, turns, by_loop)
    others = SimFiles()
    other = open_still(others, ROOMY)
    assert write(other, turns, other.turn) == order == sorted(order)
    held, after = found(log, files)
    assert (held, after) == found(other, others)
    assert held == after

"""What a start gives the core is equal, however little of the log is held: entries that the store has are told, not given.

The old way, all entries read and handed to the core, is the twin.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.consensus.bootstrap import initial_state
from stele.model.config import Configuration, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Corrupt, InvariantViolation
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.model.logrecord import SkippedRecord
from stele.raft import RaftCore, RaftOptions
from stele.raft.events import Compacted, Start
from stele.raft.log import LogView
from stele.raft.ports import LoadedLog, fold_records
from stele.wal import StreamLog
from tests.wal.simfs import SimFiles
from tests.wal.support import CONFIG, SMALL, entries, fill, key, open_still, stream_of

OPTIONS = RaftOptions(tail_bytes_max=4_000)


def entry_of(term: int, index: int, config: bool) -> Entry:
    if not config:
        return Entry(term, index, EntryKind.WRITE, index << 12, bytes([term % 256]) * 700)
    peers = CONFIG.peers[: 2 + index % 2]
    return Entry(term, index, EntryKind.CONFIG, 0, encode_configuration(Configuration(index, peers)))


def core_of(loaded: LoadedLog, config: Configuration, flushed: OpId) -> RaftCore:
    """A core as bootstrap starts it."""
    initial = initial_state(loaded, loaded.config or config, flushed, ReplicaId(1), witness=False)
    core = RaftCore(OPTIONS, ReplicaId(1), initial, random.Random(1))
    core.step(Start(1))
    return core


def known(core: RaftCore, flushed: int) -> object:
    """All that a core knows of its log, but for entries that were applied long ago."""
    log = core.log
    indexes = range(max(log.start.index - 1, 0), log.last_index + 2)
    inside = range(log.start.index, log.last_index + 1)
    return (
        core.status(),
        [log.term_at(i) for i in indexes],
        [log.config_at(i) for i in inside],
        [log.first_of_term(i) for i in inside],
        [log.last_of_term(term, at) for term in range(log.last_term + 2) for at in inside],
        (log.issued_index, log.durable_index, log.handed_index, log.unhanded_bytes, log.config_index),
        [e for e in log.tail() if e.index > flushed],
    )


def compare(stream: StreamLog, flushed: OpId, compact_to: int) -> LoadedLog:
    """Start with all entries and with those above `flushed`; what was loaded the new way."""
    whole, less = fold_records(stream.load()), fold_records(stream.load(flushed.index))
    assert not [e for e in less.entries if e.index <= flushed.index]
    assert less.last == whole.last
    for index in range(whole.last.index + 2):
        assert less.opid_at(index) == whole.opid_at(index)
    old, new = core_of(whole, CONFIG, flushed), core_of(less, CONFIG, flushed)
    assert known(new, flushed.index) == known(old, flushed.index)
    at = min(max(compact_to, old.log.start.index), flushed.index)
    for core in (old, new):
        core.step(Compacted(core.log.opid_at(at)))
    assert known(new, flushed.index) == known(old, flushed.index)
    return less


_op = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("configure"), st.integers(0, 1), st.integers(1, 2), st.booleans()),
    st.tuples(st.just("pop"), st.integers(0, 4), st.just(0), st.just(False)),
    st.tuples(st.just("flush"), st.integers(0, 4), st.just(0), st.booleans()),
    st.tuples(st.just("restart"), st.integers(0, 12), st.just(0), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(ops=st.lists(_op, max_size=30), cache=st.sampled_from([0, 3_000, 1 << 20]))
def test_a_start_gives_the_core_the_same_however_little_is_held(
    ops: list[tuple[str, int, int, bool]], cache: int
) -> None:
    files = SimFiles()
    options = replace(SMALL, segment_bytes=8 << 10, cache_bytes_max=cache)
    log = open_still(files, options)
    stream = stream_of(log)
    stream.append_term(1)
    flushed, term = OPID_NONE, 1
    for what, a, b, flag in [*ops, ("restart", 3, 0, False)]:
        last = stream.last_opid
        if what in ("append", "configure"):
            first = max(last.index + 1 - a, flushed.index + 1)
            replaces = first <= last.index
            term += flag or replaces
            stream.append_term(term)
            stream.append_entries(
                tuple(entry_of(term, i, what == "configure") for i in range(first, first + b))
            )
        elif what == "pop":
            stream.pop_entries(max(last.index + 1 - a, flushed.index + 1))
        elif what == "flush":
            log.turn()  # only what is durable here was handed out, and may be in the store
            at = fold_records(stream.load()).opid_at(max(last.index - a, flushed.index))
            assert at is not None
            flushed = at
            stream.set_flushed(flushed.index)
            if flag:
                log.collect()
        else:
            log.turn()
            if flag:
                files = files.crash(random.Random(a))
            log.close()
            log = open_still(files, options)
            stream = log.stream(key())
            stream.set_flushed(flushed.index)
            compare(stream, flushed, a)


def test_nothing_of_what_the_store_holds_is_read_or_held() -> None:
    files = SimFiles()
    log = open_still(files, replace(SMALL, cache_bytes_max=0))
    fill(log, 100)
    stream = stream_of(log)
    stream.append_term(4)
    stream.append_entries(entries((4, 101), (4, 102)))
    log.turn()
    less = compare(stream, OpId(4, 101), 50)
    assert less.skipped == SkippedRecord((OpId(1, 100), OpId(4, 101)), ())
    assert less.entries == entries((4, 102))


def test_a_store_that_its_log_does_not_meet_is_found_without_its_entries() -> None:
    log = open_still(SimFiles())
    fill(log, 10)
    stream = stream_of(log)
    for flushed, why in ((OpId(2, 7), "the log has 1.7"), (OpId(1, 11), "the log ends at 1.10")):
        with pytest.raises(Corrupt, match=why):
            core_of(fold_records(stream.load(flushed.index)), CONFIG, flushed)


def test_what_is_not_known_committed_is_never_skipped() -> None:
    with pytest.raises(InvariantViolation, match="only 4 is committed"):
        LogView(OPID_NONE, CONFIG, (), 4, 300, SkippedRecord((OpId(1, 5),), ()))
    for ends in ((OpId(2, 5), OpId(1, 6)), (OpId(1, 5), OpId(2, 5))):
        with pytest.raises(InvariantViolation, match="cannot follow"):
            LogView(OPID_NONE, CONFIG, (), 9, 300, SkippedRecord(ends, ()))


def test_a_configuration_that_another_entry_replaced_is_in_force_no_more() -> None:
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    stream.append_entries((*entries((1, 1)), entry_of(1, 2, True)))
    log.turn()
    stream.append_entries((entry_of(2, 2, False),))
    log.turn()
    for each in (stream, stream_of(open_still(files.copy()))):
        loaded = fold_records(each.load(2))
        assert loaded.skipped == SkippedRecord((OpId(1, 1), OpId(2, 2)), ())


def test_a_configuration_that_was_cut_off_is_in_force_no_more() -> None:
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    stream.append_entries((*entries((1, 1)), entry_of(1, 2, True), *entries((1, 3))))
    log.turn()
    stream.pop_entries(2)
    stream.append_entries(entries((2, 2), (2, 3)))
    log.turn()
    for each in (stream, stream_of(open_still(files.copy()))):
        each.set_flushed(3)
        assert fold_records(each.load(3)).skipped == SkippedRecord((OpId(1, 1), OpId(2, 3)), ())

"""The contract of `stele.raft.ports.LogPort`, as tests that every implementation must pass.

Subclass `LogPortContract` in a `test_*.py` file and give it a fixture `logs` that returns a `LogUnderTest`:

    class TestMyLog(LogPortContract):
        @pytest.fixture
        def logs(self, tmp_path): ...

Invariant of the suite: it speaks to a log through its port only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import pytest

from stele.model.config import Configuration, Peer, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.model.logrecord import NOTHING_SKIPPED, SkippedRecord
from stele.raft.effects import HardState, Persist
from stele.raft.ports import LoadedLog, LogPort, fold_records, persist_calls


class LogUnderTest(Protocol):
    """What a suite needs of an implementation beside the port."""

    def open(self) -> LogPort:
        """The log, made empty on the first call, afterwards as the last run left it."""

    def settle(self) -> None:
        """Block until all that was appended is durable and its `done` was called."""

    def close(self) -> None:
        """Stop in good order: what was appended becomes durable."""

    def crash(self) -> None:
        """Stop at once: what was not durable may be lost. `open` comes next."""


CONFIG = Configuration(
    -1, tuple(Peer(NodeId(f"{n:032x}"), ReplicaId(n), f"10.0.0.{n}:7050") for n in (1, 2, 3))
)
LATER_CONFIG = Configuration(4, CONFIG.peers[:2])


def entry(term: int, index: int, payload: bytes = b"") -> Entry:
    """A WRITE whose bytes tell where it belongs."""
    return Entry(term, index, EntryKind.WRITE, index << 12, payload or f"{term}.{index}".encode())


def entries(*opids: tuple[int, int]) -> tuple[Entry, ...]:
    """Several of them."""
    return tuple(entry(term, index) for term, index in opids)


def loaded(log: LogPort) -> LoadedLog:
    """What the log says of itself."""
    return fold_records(log.load())


class LogPortContract:
    """One test per clause of the port."""

    @pytest.fixture
    def logs(self) -> LogUnderTest:
        """The implementation under test."""
        raise NotImplementedError

    def _after_restarts(self, logs: LogUnderTest, check: Callable[[LoadedLog], None]) -> None:
        """What is durable must be the same at once, after a clean stop, and after a crash."""
        logs.settle()
        logs.close()
        check(loaded(logs.open()))
        logs.crash()
        check(loaded(logs.open()))

    def test_a_new_log_is_empty(self, logs: LogUnderTest) -> None:
        state = loaded(logs.open())
        assert state.hard_state == HardState(0, None)
        assert state.entries == ()
        assert state.start == OPID_NONE

    def test_term_and_vote_survive(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_term(3)
        log.append_vote(4, ReplicaId(2))

        def check(state: LoadedLog) -> None:
            assert state.hard_state == HardState(4, ReplicaId(2))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_vote_in_a_term_that_was_there_survives(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_term(4)
        logs.settle()
        log.append_vote(4, ReplicaId(2))

        def check(state: LoadedLog) -> None:
            assert state.hard_state == HardState(4, ReplicaId(2))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_higher_term_frees_the_vote(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_vote(4, ReplicaId(2))
        log.append_term(5)

        def check(state: LoadedLog) -> None:
            assert state.hard_state == HardState(5, None)

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_forced_promotion_is_a_vote_for_its_leader(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_vote(4, ReplicaId(2))
        log.append_promote(9, ReplicaId(3))

        def check(state: LoadedLog) -> None:
            assert state.hard_state == HardState(9, ReplicaId(3))

        self._after_restarts(logs, check)

    def test_entries_come_back_as_they_were(self, logs: LogUnderTest) -> None:
        log = logs.open()
        written = (
            Entry(1, 1, EntryKind.NOOP, 0, b""),
            Entry(1, 2, EntryKind.WRITE, (1 << 63) + 5, bytes(range(256)) * 40),
            Entry(2, 3, EntryKind.CONFIG, 0, b"\x01[]"),
            Entry(2, 4, EntryKind.CEILING, 7, b"\x00" * 8),
        )
        log.append_entries(written[:1])
        log.append_entries(written[1:])

        def check(state: LoadedLog) -> None:
            assert state.entries == written

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_what_the_store_holds_is_told_and_not_given(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2), (1, 3)))
        log.append_entries(
            (entry(2, 3), Entry(2, 4, EntryKind.CONFIG, 0, encode_configuration(LATER_CONFIG)))
        )
        log.append_entries(entries((3, 5), (3, 6)))
        told: list[tuple[int, SkippedRecord, int]] = [
            (0, NOTHING_SKIPPED, 6),
            (1, SkippedRecord((OpId(1, 1),), ()), 5),
            (3, SkippedRecord((OpId(1, 2), OpId(2, 3)), ()), 3),
            (5, SkippedRecord((OpId(1, 2), OpId(2, 4), OpId(3, 5)), ((4, LATER_CONFIG),)), 1),
            (9, SkippedRecord((OpId(1, 2), OpId(2, 4), OpId(3, 6)), ((4, LATER_CONFIG),)), 0),
        ]

        def check_all(log: LogPort) -> None:
            whole = loaded(log)
            for above, skipped, given in told:
                state = fold_records(log.load(above))
                assert state.skipped == skipped
                assert state.entries == whole.entries[len(whole.entries) - given :]
                assert (state.hard_state, state.start, state.last) == (
                    whole.hard_state,
                    whole.start,
                    whole.last,
                )

        logs.settle()
        check_all(log)
        logs.close()
        check_all(logs.open())
        logs.crash()
        log = logs.open()
        check_all(log)
        log.end_snapshot(OpId(2, 3), CONFIG)
        logs.settle()
        assert fold_records(log.load(3)).skipped == NOTHING_SKIPPED
        assert fold_records(log.load(4)).skipped == SkippedRecord((OpId(2, 4),), ((4, LATER_CONFIG),))

    def test_what_is_written_is_told_before_what_is_durable(self, logs: LogUnderTest) -> None:
        log = logs.open()
        told: list[str] = []
        log.append_entries(entries((1, 1)), lambda: told.append("first durable"))
        log.when_written(lambda: told.append("written"))
        log.append_entries(entries((1, 2)), lambda: told.append("second durable"))
        assert not told
        logs.settle()
        assert sorted(told) == ["first durable", "second durable", "written"]
        assert told.index("written") < told.index("second durable")

    def test_pop_drops_a_suffix(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2), (1, 3), (1, 4)))
        log.pop_entries(3)

        def check(state: LoadedLog) -> None:
            assert state.entries == entries((1, 1), (1, 2))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_pop_beyond_the_end_changes_nothing(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2)))
        log.pop_entries(3)

        def check(state: LoadedLog) -> None:
            assert state.entries == entries((1, 1), (1, 2))

        self._after_restarts(logs, check)

    def test_entries_after_a_pop_take_its_place(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2), (1, 3)))
        log.pop_entries(2)
        log.append_entries(entries((2, 2), (2, 3), (2, 4)))

        def check(state: LoadedLog) -> None:
            assert state.entries == entries((1, 1), (2, 2), (2, 3), (2, 4))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_an_entry_voids_what_was_at_or_above_its_index(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2), (1, 3), (1, 4)))
        log.append_entries(entries((2, 2)))

        def check(state: LoadedLog) -> None:
            assert state.entries == entries((1, 1), (2, 2))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_done_comes_later_and_in_order(self, logs: LogUnderTest) -> None:
        log = logs.open()
        calls: list[str] = []

        def note(name: str) -> Callable[[], None]:
            return lambda: calls.append(name)

        log.append_term(1, note("term"))
        log.append_vote(1, ReplicaId(1), note("vote"))
        log.append_entries(entries((1, 1)), note("one"))
        log.append_entries(entries((1, 2), (1, 3)), note("two"))
        log.pop_entries(3, note("pop"))
        log.append_promote(2, ReplicaId(2), note("promote"))
        logs.settle()
        assert calls == ["term", "vote", "one", "two", "pop", "promote"]

    def test_what_was_done_survives_a_crash(self, logs: LogUnderTest) -> None:
        log = logs.open()
        done: list[int] = []
        for index in range(1, 30):
            log.append_entries(entries((1, index)), lambda index=index: done.append(index))  # type: ignore[misc]
            if index == 20:
                logs.settle()
        acknowledged = max(done)
        assert acknowledged >= 20
        logs.crash()
        state = loaded(logs.open())
        assert len(state.entries) >= acknowledged
        assert state.entries == entries(*((1, i) for i in range(1, len(state.entries) + 1)))

    def test_a_crash_leaves_a_prefix(self, logs: LogUnderTest) -> None:
        """Each step raises the term and replaces the last entry: whatever is lost, the two must still fit."""
        log = logs.open()
        log.append_entries(entries((1, 1)))
        for term in range(2, 20):
            log.append_term(term)
            log.append_entries(entries((term, 2)))
        logs.crash()
        state = loaded(logs.open())
        for found in state.entries:
            assert found.term <= max(state.hard_state.term, 1)
        assert [e.index for e in state.entries] == list(range(1, len(state.entries) + 1))

    def test_a_log_goes_on_after_a_crash(self, logs: LogUnderTest) -> None:
        logs.open().append_entries(entries((1, 1), (1, 2)))
        logs.settle()
        logs.crash()
        log = logs.open()
        log.append_entries(entries((2, 3)))

        def check(state: LoadedLog) -> None:
            assert state.entries == entries((1, 1), (1, 2), (2, 3))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_entries_after_a_snapshot_survive_it(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_vote(2, ReplicaId(1))
        log.append_entries(entries((1, 1), (1, 2), (2, 3), (2, 4), (2, 5)))
        log.begin_snapshot(OpId(2, 4))
        log.end_snapshot(OpId(2, 4), LATER_CONFIG)

        def check(state: LoadedLog) -> None:
            assert state.start == OpId(2, 4)
            assert state.config == LATER_CONFIG
            assert state.entries == entries((2, 5))
            assert state.hard_state == HardState(2, ReplicaId(1))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_snapshot_beyond_the_end_empties_the_log(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_term(3)
        log.append_entries(entries((1, 1), (1, 2)))
        log.begin_snapshot(OpId(3, 9))
        log.end_snapshot(OpId(3, 9), CONFIG)
        log.append_entries(entries((3, 10)))

        def check(state: LoadedLog) -> None:
            assert state.start == OpId(3, 9)
            assert state.entries == entries((3, 10))
            assert state.hard_state == HardState(3, None)

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_snapshot_of_another_term_empties_the_log(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_term(3)
        log.append_entries(entries((1, 1), (1, 2), (1, 3)))
        log.begin_snapshot(OpId(2, 2))
        log.end_snapshot(OpId(2, 2), CONFIG)

        def check(state: LoadedLog) -> None:
            assert state.start == OpId(2, 2)
            assert state.entries == ()

        self._after_restarts(logs, check)

    def test_an_older_snapshot_changes_nothing(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2), (2, 3), (2, 4), (2, 5)))
        log.end_snapshot(OpId(2, 4), LATER_CONFIG)
        log.end_snapshot(OpId(1, 2), CONFIG)

        def check(state: LoadedLog) -> None:
            assert state.start == OpId(2, 4)
            assert state.config == LATER_CONFIG
            assert state.entries == entries((2, 5))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_snapshot_that_only_began_changes_nothing(self, logs: LogUnderTest) -> None:
        log = logs.open()
        log.append_entries(entries((1, 1), (1, 2)))
        log.begin_snapshot(OpId(1, 2))

        def check(state: LoadedLog) -> None:
            assert state.start == OPID_NONE
            assert state.entries == entries((1, 1), (1, 2))

        check(loaded(log))
        self._after_restarts(logs, check)

    def test_a_persist_effect_is_written_in_its_order(self, logs: LogUnderTest) -> None:
        log = logs.open()
        calls: list[int] = []
        persists = (
            Persist(1, HardState(1, ReplicaId(1)), None, entries((1, 1), (1, 2))),
            Persist(2, HardState(2, None), 2, entries((2, 2))),
            Persist(3, None, 2, ()),
            Persist(4, HardState(3, None), None, ()),
        )
        for persist in persists:
            for call in persist_calls(log, persist, partial(calls.append, persist.id)):
                call()
        logs.settle()
        assert calls == [1, 2, 3, 4]

        def check(state: LoadedLog) -> None:
            assert state.hard_state == HardState(3, None)
            assert state.entries == entries((1, 1))

        self._after_restarts(logs, check)

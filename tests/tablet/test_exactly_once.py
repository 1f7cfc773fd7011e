"""A retry is harmless: the first outcome again, after a flush, a restart, on a copy; and what is too old is never new."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowError, RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Retryable
from stele.model.kvop import KeyOp, KeyOperation
from stele.model.writeop import WriteHeader
from stele.tablet.block_checks import CHECKED_ROWS_MAX
from stele.tablet.exactly_once import DETAILS_BYTES_MAX, IDLE_US, OUTCOMES_MAX, ExactlyOnce, encode
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import Outcome
from stele.tablet.store import TabletStore
from tests.tablet.test_keyspace import entry_of
from tests.tablet.twin import FOREVER, START_US, block_of, flush, header, new_store, rows_of, write_entry

ONE, TWO = b"1" * 16, b"2" * 16


def ceiling_entry(index: int, at_us: int) -> Entry:
    """What a leader brings into the log at this time."""
    return Entry(1, index, EntryKind.CEILING, at_us << 12, ((at_us + 250_000) << 12).to_bytes(8, "little"))


def _insert(n: int) -> bytes:
    return block_of([{"k": "k", "n": n, "v": "x", "w": 1, "d": None}], RowOp.INSERT)


def test_a_retry_gets_the_first_outcome_whatever_lies_between(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    two_rows = block_of([{"k": "k", "n": n, "v": "x", "w": 1, "d": None} for n in (1, 1)], RowOp.INSERT)
    first = store.apply(write_entry(1, two_rows, client_id=ONE, sequence=1))
    assert [(e.row, e.code) for e in first.row_errors] == [(1, Code.ALREADY_PRESENT)]
    again = store.apply(write_entry(2, two_rows, client_id=ONE, sequence=1))
    assert again == Outcome(first.timestamp, first.row_errors, duplicate=True)
    flush(store)
    store.checkpoint(tmp_path / "copy")
    for directory in ("t", "copy"):
        reopened = TabletStore.open(tmp_path / directory, FOREVER)
        assert reopened.exactly_once_checksum() == store.exactly_once_checksum()
        assert reopened.apply(write_entry(3, two_rows, client_id=ONE, sequence=1)) == again
        with reopened.view() as view:
            assert len(rows_of(view.scan())) == 1


def test_a_flush_keeps_no_outcome_of_a_later_write(tmp_path: Path) -> None:
    """Its replay after a restart would be taken for a retry, and an acknowledged row be lost."""
    store = new_store(tmp_path / "t")
    store.apply(write_entry(1, _insert(1), client_id=ONE, sequence=1))
    job = store.begin_flush()
    assert job is not None
    later = write_entry(2, _insert(2), client_id=ONE, sequence=2)
    store.apply(later)
    job.write()
    reopened = TabletStore.open(tmp_path / "t", FOREVER)
    assert not reopened.apply(later).duplicate
    with reopened.view() as view:
        assert len(rows_of(view.scan())) == 2


def test_another_payload_under_a_used_sequence_is_refused(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    store.apply(write_entry(1, _insert(1), client_id=ONE, sequence=1))
    refused = store.apply(write_entry(2, _insert(2), client_id=ONE, sequence=1))
    assert refused.code is Code.DIGEST_MISMATCH
    assert refused.error() is not None
    assert store.apply(write_entry(3, _insert(2), client_id=TWO, sequence=1)).code is Code.OK


def test_a_sequence_below_the_lowest_unfinished_is_too_old(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    for index in (1, 2, 3):
        store.apply(write_entry(index, _insert(index), client_id=ONE, sequence=index))
    store.apply(write_entry(4, _insert(4), client_id=ONE, sequence=4, lowest_unfinished=3))
    assert (
        store.apply(write_entry(5, _insert(2), client_id=ONE, sequence=2, lowest_unfinished=3)).code
        is Code.TOO_OLD
    )
    assert store.apply(write_entry(6, _insert(3), client_id=ONE, sequence=3, lowest_unfinished=3)).duplicate


def test_an_idle_client_is_forgotten_and_then_too_old(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    store.apply(write_entry(1, _insert(1), client_id=ONE))
    later = START_US + IDLE_US + 10
    store.apply(write_entry(2, _insert(2), client_id=TWO, first_attempt_us=later, at_us=later))
    late = store.apply(write_entry(3, _insert(1), client_id=ONE, at_us=later + 1))
    assert late.code is Code.TOO_OLD
    assert not late.duplicate
    # Unknown, but made after the mark: new.
    fresh = write_entry(4, _insert(3), client_id=b"3" * 16, first_attempt_us=START_US + 1, at_us=later + 2)
    assert store.apply(fresh).code is Code.OK


@pytest.mark.parametrize("seed", range(5))
def test_clients_are_forgotten_as_from_a_list_of_all(seed: int) -> None:
    """Beside a list of all clients, moved about and looked through with each write."""
    rng, idle_us, clients_max = random.Random(seed), 50, 4
    once = ExactlyOnce(idle_us=idle_us, clients_max=clients_max)
    known: list[tuple[bytes, int]] = []
    now_us = 1_000
    for sequence in range(1, 400):
        now_us += rng.choice((0, 1, 5, 60))
        client_id = bytes([rng.choice((1, 1, 1, 2, 3, 4, 5, 6))]) * 16
        write = replace(header(b"", client_id=client_id, sequence=sequence), first_attempt_us=now_us)
        known = [(name, at) for name, at in known if at + idle_us >= now_us]
        if once.earlier(write, now_us << 12) is None:
            known = [*((name, at) for name, at in known if name != client_id), (client_id, now_us)]
            once.record(write, Outcome(now_us << 12))
            known = known[-clients_max:]
        assert [(name, last) for name, _, last, _, _ in once.frozen()[1]] == known


def test_idle_clients_are_forgotten_by_a_ceiling_too(tmp_path: Path) -> None:
    """A tablet that nobody writes to kept all of them, in memory and in its files. Who takes no notice of the ceiling, as an
    earlier program, does the same with what is written next."""
    stores = [new_store(tmp_path / name) for name in ("notices", "does-not")]
    for store in stores:
        store.apply(write_entry(1, _insert(1), client_id=ONE))
        assert store.clients_idle_us == START_US + 1 + IDLE_US
    later = START_US + IDLE_US + 10
    for at_us, clients in ((START_US + IDLE_US, 1), (later, 0)):
        stores[0].apply(ceiling_entry(stores[0].applied.index + 1, at_us))
        stores[1].apply(Entry(1, stores[1].applied.index + 1, EntryKind.NOOP, 0, b""))
        assert [store._once.clients for store in stores] == [clients, 1]
    assert stores[0].clients_idle_us is None
    flush(stores[0])
    stores[0] = TabletStore.open(tmp_path / "notices", FOREVER)
    assert stores[0]._once.clients == 0
    for write in (
        write_entry(4, _insert(1), client_id=ONE, at_us=later + 1),
        write_entry(5, _insert(2), client_id=TWO, first_attempt_us=START_US - 1, at_us=later + 2),
        write_entry(6, _insert(3), client_id=TWO, first_attempt_us=START_US + 1, at_us=later + 3),
    ):
        outcomes = [store.apply(write) for store in stores]
        assert outcomes[0] == outcomes[1]
        assert (outcomes[0].code is Code.TOO_OLD) is (write.index < 6)
    assert stores[0].exactly_once_checksum() == stores[1].exactly_once_checksum()


def test_a_key_space_forgets_idle_clients_by_a_ceiling_too(tmp_path: Path) -> None:
    space = KeySpace.create(tmp_path / "k")
    put = [KeyOperation(KeyOp.REPLACE, b"k", b"v")]
    space.apply(entry_of(1, put, client_id=ONE))
    assert space.clients_idle_us == START_US + 1 + IDLE_US
    space.apply(ceiling_entry(2, START_US + IDLE_US + 10))
    assert space.clients_idle_us is None
    late = replace(entry_of(3, put, client_id=ONE), timestamp=(START_US + IDLE_US + 11) << 12)
    assert space.apply(late).code is Code.TOO_OLD


def test_who_was_forgotten_is_too_old_after_a_restart_too(tmp_path: Path) -> None:
    """Else the retry would be done a second time."""
    store = new_store(tmp_path / "t")
    store.apply(write_entry(1, _insert(1), client_id=ONE))
    later = START_US + IDLE_US + 10
    store.apply(write_entry(2, _insert(2), client_id=TWO, first_attempt_us=later, at_us=later))
    flush(store)
    reopened = TabletStore.open(tmp_path / "t", FOREVER)
    assert reopened.apply(write_entry(3, _insert(1), client_id=ONE, at_us=later + 1)).code is Code.TOO_OLD


def test_a_client_that_goes_on_writing_is_not_forgotten(tmp_path: Path) -> None:
    """Its first write is long ago: were it counted from there, all that it writes from then on would be TOO_OLD."""
    store = new_store(tmp_path / "t")
    for n in range(5):
        at_us = START_US + n * IDLE_US * 2 // 3
        write = write_entry(n + 1, _insert(n), client_id=ONE, sequence=n + 1, at_us=at_us)
        assert store.apply(write).code is Code.OK
    again = write_entry(6, _insert(4), client_id=ONE, sequence=5, at_us=at_us + 1)
    assert store.apply(again).duplicate


def test_who_is_forgotten_later_and_was_made_earlier_brings_nobody_back(tmp_path: Path) -> None:
    """The retry of the one that was forgotten first would be new, and be done a second time."""
    store = new_store(tmp_path / "t")
    for index, client, made in ((1, ONE, 50), (2, TWO, 10)):
        write = write_entry(
            index,
            _insert(index),
            client_id=client,
            first_attempt_us=START_US + made,
            at_us=START_US + 60 + index,
        )
        assert store.apply(write).code is Code.OK
    later = START_US + IDLE_US + 100
    third = write_entry(3, _insert(3), client_id=b"3" * 16, first_attempt_us=later, at_us=later)
    assert store.apply(third).code is Code.OK
    for index, client, made in ((4, ONE, 50), (5, TWO, 10)):
        late = write_entry(
            index, _insert(index), client_id=client, first_attempt_us=START_US + made, at_us=later + index
        )
        assert store.apply(late).code is Code.TOO_OLD


def test_what_a_client_has_finished_is_too_old_after_a_restart_too(tmp_path: Path) -> None:
    """A message of long ago, that went astray, names the lowest of then: its write would be done a second time."""
    store = new_store(tmp_path / "t")
    astray = _insert(1)
    for sequence, lowest in ((1, 1), (2, 1), (3, 3)):
        write = write_entry(
            sequence, _insert(sequence), client_id=ONE, sequence=sequence, lowest_unfinished=lowest
        )
        assert store.apply(write).code is Code.OK
    flush(store)
    reopened = TabletStore.open(tmp_path / "t", FOREVER)
    late = reopened.apply(write_entry(4, astray, client_id=ONE, sequence=1, lowest_unfinished=1))
    assert late.code is Code.TOO_OLD


def test_a_write_that_is_refused_whole_is_refused_again_alike(tmp_path: Path) -> None:
    """A block of another version of the schema: this follows from the entry and the state, so all replicas refuse it alike."""
    store = new_store(tmp_path / "t")
    block = _insert(1)
    other = block[:4] + (2).to_bytes(4, "little") + block[8:]
    first = store.apply(write_entry(1, other, client_id=ONE))
    assert first.code is Code.SCHEMA_MISMATCH
    again = store.apply(write_entry(2, other, client_id=ONE))
    assert (again.code, again.message, again.duplicate) == (first.code, first.message, True)


def test_the_number_of_clients_is_bounded() -> None:
    state = ExactlyOnce(clients_max=3)
    for n in range(6):
        head = header(b"", client_id=bytes([n]) * 16, first_attempt_us=START_US + n)
        assert state.earlier(head, (START_US + n) << 12) is None
        state.record(head, Outcome(1))
    assert state.clients == 3
    pushed_out = header(b"", client_id=bytes(16 * [1]), first_attempt_us=START_US + 1)
    found = state.earlier(pushed_out, (START_US + 9) << 12)
    assert found is not None
    assert found.code is Code.TOO_OLD


def test_who_wrote_last_is_forgotten_last() -> None:
    state = ExactlyOnce(clients_max=2)
    for n, client in enumerate((1, 2, 1, 3)):
        head = header(b"", client_id=bytes([client]) * 16, sequence=n + 1, first_attempt_us=START_US + client)
        assert state.earlier(head, (START_US + n) << 12) is None
        state.record(head, Outcome(1))
    kept = header(b"", client_id=bytes([1]) * 16, sequence=3, first_attempt_us=START_US + 1)
    again = state.earlier(kept, (START_US + 9) << 12)
    assert again is not None and again.duplicate


def test_the_unfinished_sequences_of_a_client_are_bounded() -> None:
    state = ExactlyOnce()
    heads = (header(b"", client_id=ONE, sequence=n) for n in range(1, OUTCOMES_MAX + 1))
    for head in heads:
        assert state.earlier(head, START_US << 12) is None
        state.record(head, Outcome(1))
    more = header(b"", client_id=ONE, sequence=OUTCOMES_MAX + 1)
    refused = state.earlier(more, START_US << 12)
    assert refused is not None and refused.code is Code.TOO_LARGE
    again = state.earlier(header(b"", client_id=ONE, sequence=7), START_US << 12)
    assert again is not None and again.duplicate
    assert state.earlier(replace(more, lowest_unfinished=2), START_US << 12) is None


def test_the_state_codes_whole() -> None:
    state = ExactlyOnce()
    head = header(b"", client_id=ONE, sequence=5)
    state.earlier(head, START_US << 12)
    state.record(head, Outcome(7, value=b"v", code=Code.CAS_FAILED, message="m"))
    data = encode(state.frozen())
    again = ExactlyOnce.decode(data)
    assert encode(again.frozen()) == data
    assert again.checksum() == state.checksum()
    with pytest.raises(Corrupt):
        ExactlyOnce.decode(data[:-3])


PRESENT, ABSENT = "the key is present; use upsert to overwrite it", "the key is absent"
EVERY_ROW = tuple(RowError(row, Code.ALREADY_PRESENT, PRESENT) for row in range(CHECKED_ROWS_MAX))


def head_of(n: int, sequence: int = 1, lowest: int = 1) -> WriteHeader:
    return header(
        b"",
        client_id=n.to_bytes(16, "little"),
        sequence=sequence,
        lowest_unfinished=lowest,
        first_attempt_us=START_US + n,
    )


def done(state: ExactlyOnce, head: WriteHeader, time: int, outcome: Outcome) -> Outcome:
    """What becomes of a write at this many microseconds, the outcome of which is this one if it is new."""
    timestamp = (START_US + time) << 12
    earlier = state.earlier(head, timestamp)
    if earlier is None:
        state.record(head, replace(outcome, timestamp=timestamp))
    return earlier or replace(outcome, timestamp=timestamp)


def as_before(state: ExactlyOnce) -> bytes:
    """What an earlier program writes of the same state, each row error by itself."""
    mark_us, clients = state.frozen()
    rows: list[Any] = []
    for client_id, first, last, lowest, outcomes in clients:
        told: list[Any] = []
        for sequence, (digest, o, runs) in outcomes:
            errors = sorted([row, int(code), message] for code, message, rows in runs for row in rows)
            value = None if o.value is None else o.value.hex()
            told.append([sequence, digest, [o.timestamp, errors, value, int(o.code), o.message]])
        rows.append([client_id.hex(), first, last, lowest, told])
    return json.dumps([mark_us, rows], separators=(",", ":")).encode()


def test_what_refused_rows_take_is_bounded() -> None:
    """Programs that come and go, each with a block of rows that are there already: 91 MiB in the file of one tablet, and
    161 MiB of memory, at each start anew."""
    state = ExactlyOnce()
    clients = range(1, 41)
    for n in clients:
        done(state, head_of(n), n, Outcome(row_errors=EVERY_ROW))
    data = encode(state.frozen())
    assert len(data) < DETAILS_BYTES_MAX + 1_000 * len(clients)
    assert state.clients == len(clients)
    for each in (state, ExactlyOnce.decode(data)):
        newest = each.earlier(head_of(clients[-1]), (START_US + 100) << 12)
        assert newest is not None and newest.duplicate and newest.row_errors == EVERY_ROW
        oldest = each.earlier(head_of(1), (START_US + 100) << 12)
        assert oldest is not None and oldest.code is Code.TOO_OLD


def test_a_state_of_an_earlier_program_is_read_in_bounded_memory() -> None:
    state = ExactlyOnce(details_bytes_max=1 << 40)
    for n in range(1, 31):
        done(state, head_of(n), n, Outcome(row_errors=EVERY_ROW))
    data = encode(state.frozen())
    assert data == as_before(state)
    tracemalloc.start()
    try:
        again = ExactlyOnce.decode(data)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.7 * len(data)  # one text of it, and a client at a time
    assert kept < len(data) // 20
    assert len(encode(again.frozen())) < DETAILS_BYTES_MAX + 30_000
    newest = again.earlier(head_of(30), (START_US + 100) << 12)
    assert newest is not None and newest.row_errors == EVERY_ROW


def test_a_value_and_a_message_count_as_well() -> None:
    """A key space answers what is in the way, up to 8 MiB."""
    state = ExactlyOnce(details_bytes_max=5_000)
    for n in range(1, 11):
        outcome = Outcome(value=bytes(1_000), code=Code.ALREADY_PRESENT, message="m" * 300)
        done(state, head_of(n), n, outcome)
    found = [state.earlier(head_of(n), (START_US + 100) << 12) for n in range(1, 11)]
    assert [each.code for each in found if each] == [Code.TOO_OLD] * 8 + [Code.ALREADY_PRESENT] * 2
    assert found[-1] is not None and found[-1].value == bytes(1_000)


def test_details_that_are_too_many_by_themselves_are_not_kept() -> None:
    state = ExactlyOnce(details_bytes_max=1_000)
    first = done(state, head_of(1), 1, Outcome(row_errors=EVERY_ROW))
    assert first.row_errors == EVERY_ROW
    assert done(state, head_of(1), 2, Outcome()).code is Code.TOO_OLD


def test_what_a_client_has_finished_makes_room_for_others() -> None:
    state = ExactlyOnce(details_bytes_max=2 * CHECKED_ROWS_MAX * 60)
    done(state, head_of(1), 1, Outcome(row_errors=EVERY_ROW))
    for n in range(1, 20):
        done(state, head_of(2, n, n), n + 1, Outcome(row_errors=EVERY_ROW))
    again = done(state, head_of(1), 30, Outcome())
    assert again.duplicate and again.row_errors == EVERY_ROW


@pytest.mark.parametrize("seed", range(8))
def test_a_state_that_was_reopened_goes_on_as_one_that_was_not(seed: int) -> None:
    """Replicas flush and start when they will: what they forget must not depend on it, or one leader tells another story
    than the next, and checksums differ."""
    rng = random.Random(seed)
    bounds: dict[str, int] = {"clients_max": 6, "details_bytes_max": 3_000}
    states = [ExactlyOnce(**bounds), ExactlyOnce(**bounds)]
    next_sequence: dict[int, int] = {}
    for time in range(1, 400):
        n = rng.randrange(1, 11)
        top = next_sequence.get(n, 0) + 1
        sequence = max(1, top - rng.randrange(3))
        next_sequence[n] = max(top - 1, sequence)
        head = head_of(n, sequence, max(1, sequence - rng.randrange(4)))
        errors = tuple(
            RowError(row, *rng.choice([(Code.ALREADY_PRESENT, PRESENT), (Code.NOT_FOUND, ABSENT)]))
            for row in range(rng.choice([0, 0, 1, 7, 30]))
        )
        value = bytes(rng.choice([0, 200])) or None
        outcome = Outcome(row_errors=errors, value=value, message="é\n" * rng.randrange(2))
        first, second = (done(state, head, time, outcome) for state in states)
        assert first == second
        if rng.random() < 0.2:
            states[1] = ExactlyOnce.decode(encode(states[1].frozen()), **bounds)
        assert encode(states[0].frozen()) == encode(states[1].frozen()) == as_before(states[0])


def test_a_write_whose_refusals_were_forgotten_is_not_done_again(tmp_path: Path) -> None:
    """Some of its rows may have been written, and others' writes lie between."""
    store = new_store(tmp_path / "t")
    rows = [{"k": "k", "n": n, "v": "x", "w": 1, "d": None} for n in range(CHECKED_ROWS_MAX)]
    store.apply(write_entry(1, block_of(rows[1:], RowOp.UPSERT)))
    first = write_entry(2, block_of(rows, RowOp.INSERT), client_id=ONE)
    assert len(store.apply(first).row_errors) == CHECKED_ROWS_MAX - 1
    store.apply(write_entry(3, block_of([{"k": "k", "n": 0}], RowOp.DELETE)))
    refused = block_of(rows[1:], RowOp.INSERT)
    for index in range(4, 12):
        assert store.apply(write_entry(index, refused, client_id=bytes([index]) * 16)).row_errors
    flush(store)
    for each in (store, TabletStore.open(tmp_path / "t", FOREVER)):
        retry = each.apply(write_entry(12, block_of(rows, RowOp.INSERT), client_id=ONE))
        assert retry.code is Code.TOO_OLD
        with each.view() as view:
            assert len(rows_of(view.scan())) == CHECKED_ROWS_MAX - 1


def of_client(client_id: bytes, sequence: int, lowest: int = 1) -> WriteHeader:
    return WriteHeader(client_id, sequence, lowest, START_US, 7)


def remembers(state: ExactlyOnce, client_id: bytes, sequence: int, at_us: int = START_US + 1) -> None:
    """A write that is applied."""
    head = of_client(client_id, sequence)
    assert state.earlier(head, at_us << 12) is None
    state.record(head, Outcome(at_us << 12))


def test_new_ids_push_out_no_client_that_wrote_just_now() -> None:
    """Else the mark would rise to where ids of a late clock are refused."""
    state = ExactlyOnce(clients_max=2)
    for client_id in (ONE, TWO):
        remembers(state, client_id, 1)
    error_us = 500_000
    new = of_client(bytes(15) + b"3", 1)
    with pytest.raises(Retryable) as full:
        state.admit(new, START_US + 2 * error_us, error_us)
    assert full.value.code is Code.THROTTLED and full.value.retry_after_ms == 1
    state.admit(new, START_US + 2 * error_us + 1, error_us)
    state.admit(of_client(ONE, 2), START_US, error_us)


def test_unfinished_writes_are_bounded_and_a_client_can_always_finish() -> None:
    state = ExactlyOnce(outcomes_max=4)
    for sequence in (2, 3, 4, 5):
        remembers(state, ONE, sequence)
    with pytest.raises(Retryable, match="this client id has 4 unfinished writes") as full:
        state.admit(of_client(ONE, 6), START_US, 0)
    assert full.value.code is Code.THROTTLED
    state.admit(of_client(ONE, 1), START_US, 0)  # what it must finish before the others
    state.admit(of_client(ONE, 4), START_US, 0)  # a retry
    state.admit(of_client(ONE, 6, lowest=5), START_US, 0)
    state.admit(of_client(TWO, 1), START_US, 0)
    remembers(state, TWO, 1)
    state.admit(of_client(TWO, 2), START_US, 0)  # its part of them is two
    remembers(state, TWO, 2)
    with pytest.raises(Retryable):
        state.admit(of_client(TWO, 3), START_US, 0)

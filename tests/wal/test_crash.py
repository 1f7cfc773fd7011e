"""Power cuts at every kind of moment: what was acknowledged is there, and what is there is a prefix of what was asked.

One seed draws the calls, the moments at which the log writes, the file operation at which the power goes (also within
open and within a collection), and what the disk keeps. Nothing is concurrent here, so a seed repeats itself.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from stele.model.entry import Entry, EntryKind
from stele.model.errors import SteleError
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey
from stele.wal import Log, StreamLog
from tests.wal.simfs import PowerOff, SimFiles
from tests.wal.support import CONFIG, SMALL, LoopSide, fill, key, loaded, open_still
from tests.wal.twin import Twin, TwinStream

SEEDS = int(os.environ.get("STELE_WAL_SEEDS", "60"))
Step = Callable[[Twin], None]


class _Run:
    """One seed's story: `twins[k]` is the state after k calls since the last boot; `acknowledged` counts them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        compression = self.rng.choice((None, None, "lz4", "zstd"))
        self.options = replace(
            SMALL,
            segment_bytes=self.rng.choice((8 << 10, 12 << 10, 32 << 10)),
            group_bytes_max=self.rng.choice((300, 2000, 1 << 20)),
            cache_bytes_max=self.rng.choice((0, 2000, 1 << 20)),
            compression=compression,
        )
        self.files = SimFiles()
        self.twins = [Twin()]
        self.acknowledged = 0
        self.names = 0
        self.side: LoopSide | None = None
        self.told = 0
        """The place up to which the log said it survives power loss: no later boot may find an end before it."""
        self.fresh: set[StreamKey] = set()
        """Streams with which nothing was done but that they were made: copies that never came to anything."""

    def boot(self) -> Log | None:
        """Open, with luck; then what is there must be a prefix that holds all that was acknowledged."""
        if self.rng.random() < 0.3:
            self.files.fail_after = self.rng.randrange(30)
        try:
            log = open_still(self.files, self.options)
        except PowerOff:
            self.files = self.files.crash(self.rng)
            return None
        assert not log.recovery.failed, log.recovery.failed
        self.files.fail_after = None
        assert log.recovery.found >= self.told
        # A log without an event loop, or one whose small batches are written by it: crashes fall between its steps.
        self.side = LoopSide(log) if self.rng.random() < 0.6 else None
        self._tell(log)
        shown = {k: loaded(log.stream(k)) for k in log.shared.states}
        for k in range(len(self.twins) - 1, self.acknowledged - 1, -1):
            twin = self.twins[k]
            if twin.streams.keys() == shown.keys() and all(
                s.agrees(shown[n]) for n, s in twin.streams.items()
            ):
                break
        else:
            raise AssertionError(f"no prefix from call {self.acknowledged} on is what the log shows: {shown}")
        self.twins = [twin.copy()]
        for name, stream in self.twins[0].streams.items():
            log.stream(name).set_flushed(stream.flushed)
        self.acknowledged = 0
        return log

    def live(self, log: Log) -> None:
        """Calls until the power goes or the log is closed."""
        self.files.fail_after = self.rng.choice((None, self.rng.randrange(5, 60), self.rng.randrange(5, 200)))
        try:
            for _ in range(self.rng.randrange(5, 60)):
                self._call(log)
                if self.rng.random() < 0.4:
                    self._go_on(log)
                self._tell(log)
                if log.failed is not None:
                    break
            else:
                if self.rng.random() < 0.5:
                    log.close()
                    if log.failed is None:
                        self.acknowledged = len(self.twins) - 1
        except OSError:
            pass
        except SteleError:
            assert log.failed is not None
        self.files = self.files.crash(self.rng)

    def _go_on(self, log: Log) -> None:
        """What was appended gets further: in the thread, or a step or all the way in the loop."""
        step = self.rng.random()
        if self.side is None or step < 0.15:
            log.turn()
        elif step < 0.5:
            self.side.loop.turn()
        elif step < 0.8 and self.side.sync.under_way:
            self.side.sync.end()
            if self.rng.random() < 0.8:
                self.side.sync.tell()
        else:
            self.side.sync.tell()
            self.side.run()

    def _tell(self, log: Log) -> None:
        assert log.synced_place >= self.told
        self.told = log.synced_place

    def _call(self, log: Log) -> None:
        rng = self.rng
        names = sorted(self.twins[-1].streams)
        if not names or (len(names) < 4 and rng.random() < 0.1):
            self.names += 1
            self._create(log, key(self.names))
            return
        name = rng.choice(names)
        stream, twin = log.stream(name), self.twins[-1].streams[name]
        what = rng.random()
        if twin.tombstoned:
            if what < 0.5:
                self._done(lambda t: t.streams.pop(name) and None)
                log.forget(name, self._ack())
            return
        if name in self.fresh and rng.random() < 0.3:
            self._again(log, name)
            return
        self.fresh.discard(name)
        if what < 0.55:
            self._entries(stream, twin)
        elif what < 0.65:
            term, who = twin.term + rng.randrange(0, 2), ReplicaId(rng.randrange(1, 4))
            self._done(lambda t: self._set(t, name, term=term, vote=who))
            stream.append_vote(term, who, self._ack())
        elif what < 0.72:
            term = twin.term + 1
            self._done(lambda t: self._set(t, name, term=term, vote=None))
            stream.append_term(term, self._ack())
        elif what < 0.79 and twin.last.index > twin.flushed:
            at = rng.randint(twin.flushed + 1, twin.last.index + 1)
            self._done(lambda t: t.streams[name].cut(at))
            stream.pop_entries(at, self._ack())
        elif what < 0.85:
            self._snapshot(stream, twin)
        elif what < 0.89:
            self._done(lambda t: None)
            if not stream.write_again(1 << 20, self._ack()):
                self.twins.pop()
        elif what < 0.96:
            flushed = rng.randint(twin.flushed, max(twin.last.index, twin.flushed))
            self.twins[-1].streams[name].flushed = flushed
            stream.set_flushed(flushed)
            log.collect()
        elif what < 0.98:
            self._done(lambda t: self._set(t, name, tombstoned=True, entries=[]))
            log.tombstone(name, self._ack())

    def _create(self, log: Log, name: StreamKey) -> None:
        """A new tablet's stream, or a copy's, which begins behind its checkpoint."""
        start = self.rng.choice(
            (OPID_NONE, OPID_NONE, OpId(self.rng.randrange(1, 5), self.rng.randrange(1, 90)))
        )
        self.fresh.add(name)
        self._done(lambda t: t.streams.update({name: TwinStream(start=start, flushed=start.index)}))
        log.create_stream(name, start, CONFIG, self._ack())

    def _again(self, log: Log, name: StreamKey) -> None:
        """A copy that began and never came to anything is begun anew under its name: forgotten first, or not."""
        if self.rng.random() < 0.5:
            self._done(lambda t: t.streams.pop(name) and None)
            log.forget(name, self._ack())
            if self.rng.random() < 0.5:
                log.turn()
        self._create(log, name)

    def _entries(self, stream: StreamLog, twin: TwinStream) -> None:
        rng = self.rng
        first = max(twin.flushed + 1, twin.last.index + 1 - rng.choice((0, 0, 0, 1, 3)))
        if first > twin.last.index + 1:
            return
        size = rng.choice((0, 10, 100, 3000))
        new = tuple(
            Entry(twin.last.term + 1, first + i, EntryKind.WRITE, rng.getrandbits(64), rng.randbytes(size))
            for i in range(rng.randint(1, 4))
        )
        self._done(lambda t: t.streams[stream.key].put(new))
        stream.append_entries(new, self._ack())

    def _snapshot(self, stream: StreamLog, twin: TwinStream) -> None:
        opids = [e.opid for e in twin.entries] + [OpId(twin.last.term + 1, twin.last.index + 3)]
        opid = self.rng.choice(opids)
        self._done(lambda t: t.streams[stream.key].snapshot(opid, CONFIG))
        stream.begin_snapshot(opid)
        stream.end_snapshot(opid, CONFIG, self._ack())

    def _set(self, twin: Twin, name: StreamKey, **fields: object) -> None:
        for field, value in fields.items():
            setattr(twin.streams[name], field, value)

    def _done(self, step: Step) -> None:
        twin = self.twins[-1].copy()
        step(twin)
        self.twins.append(twin)

    def _ack(self) -> Callable[[], None]:
        number = len(self.twins) - 1

        def acknowledged() -> None:
            assert self.acknowledged < number
            self.acknowledged = number

        return acknowledged


@pytest.mark.parametrize("block", range(4))
def test_power_cuts(block: int) -> None:
    for seed in range(block, SEEDS, 4):
        run = _Run(seed)
        try:
            for _ in range(8):
                log = run.boot()
                if log is not None:
                    run.live(log)
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise


def test_a_start_that_is_cut_short_anywhere_loses_nothing() -> None:
    """What the old tail holds beyond its synced mark stands in a new segment, before the old one is given away."""
    for cut in range(3):
        files = SimFiles()
        log = open_still(files)
        fill(log, 3, 100)
        files = files.crash(random.Random(cut))
        for after in range(40):
            trying = files.copy()
            trying.fail_after = after
            with contextlib.suppress(PowerOff, OSError):
                open_still(trying)
            for seed in range(3):
                again = open_still(trying.copy().crash(random.Random(seed)))
                assert not again.recovery.failed
                assert [e.index for e in loaded(again.stream(key())).entries] == [1, 2, 3], (cut, after, seed)

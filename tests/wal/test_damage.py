"""Random logs of several streams, random damage: a stream is served whole and right, or it is FAILED; none in between.

All of the log was synced and its last marker is there, so nothing may be taken for a torn tail. Beside that, footers and
metadata must clear some streams: a log that fails all of them on each scratch would pass otherwise.
"""

from __future__ import annotations

import os
import random

from stele.model.errors import Corrupt, Rejected
from stele.model.ids import OPID_NONE, ReplicaId
from stele.wal.segment import sequence_of
from tests.wal.simfs import SimFiles
from tests.wal.support import CONFIG, entry, key, loaded, open_still
from tests.wal.test_crash import _Run

SEEDS = int(os.environ.get("STELE_WAL_SEEDS", "30"))
SCRATCHES = 12


def _scratch(files: SimFiles, rng: random.Random, *, closed: bool) -> str:
    """Flip a bit, or blank a sector, or shorten a file.

    A log that was not closed gets flips only: a sector that holds its last group and the marker too is the limit that
    README.md names.
    """
    paths = [p for p in files.paths() if sequence_of(p.name) is not None]
    path = rng.choice(paths)
    data = files.content(path)
    used = max(len(bytes(data).rstrip(b"\0")), 1)
    at = rng.randrange(used)
    what = rng.random()
    if what < 0.6 or not closed:
        data[at] ^= 1 << rng.randrange(8)
    elif what < 0.9:
        at -= at % 512
        data[at : at + 512] = bytes(min(512, len(data) - at))
    else:
        files.set_content(path, bytes(data[:at]))
    return f"{path.name} at {at}"


def test_a_damaged_log_serves_a_stream_right_or_not_at_all() -> None:
    served_beside_failed = 0
    for seed in range(SEEDS):
        run = _Run(seed + 1000)
        rng = run.rng
        log = open_still(run.files, run.options)
        for _ in range(rng.randrange(20, 80)):
            run._call(log)
            if rng.random() < 0.5:
                log.turn()
        closed = rng.random() < 0.5
        log.close() if closed else log.turn()
        twin = run.twins[-1]
        for scratch in range(SCRATCHES):
            files = run.files.copy()
            where = _scratch(files, rng, closed=closed)
            try:
                found = open_still(files, run.options)
            except (Corrupt, Rejected):
                continue
            good = 0
            for name, expected in twin.streams.items():
                if name in found.recovery.failed:
                    continue
                if name not in found.shared.states and found.recovery.damages:
                    continue  # its creation is among what was lost, and that is told
                if found.stream(name).tombstoned and found.stream(name).damaged:
                    continue  # removed whatever was lost, and known not to vote
                assert expected.agrees(loaded(found.stream(name))), (seed, scratch, where, name)
                good += 1
            for name in (
                found.shared.states.keys() - twin.streams.keys()
            ):  # it was forgotten, in what was lost
                assert name in found.recovery.failed or found.stream(name).tombstoned, (seed, where)
            served_beside_failed += bool(good and found.recovery.failed)
            again = open_still(files, run.options)
            assert again.recovery.failed.keys() == found.recovery.failed.keys(), (seed, scratch, where)
    assert served_beside_failed > 10


def test_a_forget_from_before_the_damage_does_not_end_it() -> None:
    """A copy begun anew under its name, then damaged (seed 10 above): the second start took it for sound and empty."""
    files = SimFiles()
    log = open_still(files)
    log.create_stream(key(), OPID_NONE, CONFIG)
    log.turn()
    log.forget(key())
    log.turn()
    stream = log.create_stream(key(), OPID_NONE, CONFIG)
    other = log.create_stream(key(2), OPID_NONE, CONFIG)
    first = log._appender.active.path  # type: ignore[union-attr]
    while log._appender.active.path == first:  # type: ignore[union-attr]
        other.append_entries((entry(1, other.last_opid.index + 1, b"x" * 1000),))
        log.turn()
    stream.append_vote(7, ReplicaId(2))
    log.turn()
    files.content(log._appender.active.path)[146] ^= 1  # type: ignore[union-attr]
    for _ in range(3):  # the first start takes the segment away, and with it what proves the damage
        found = open_still(files)
        assert key() in found.recovery.failed
    found.forget(key())  # from here on it may
    found.turn()
    assert key() not in open_still(files).recovery.failed

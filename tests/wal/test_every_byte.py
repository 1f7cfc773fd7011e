"""A small log cut at every length, and with every byte flipped: never wrong entries, never a silent loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from stele.model.entry import Entry
from stele.model.errors import Corrupt, Rejected
from stele.model.ids import ReplicaId
from stele.wal.metadata import COPY, METADATA
from stele.wal.options import HEADER_BYTES
from stele.wal.segment import sequence_of
from tests.wal.simfs import SimFiles
from tests.wal.support import DIRECTORY, SMALL, entry, loaded, open_still, stream_of

_ENTRIES = 6
_OPTIONS = replace(SMALL, segment_bytes=8 << 10)


def _written() -> tuple[SimFiles, list[Path]]:
    """Entries 1 to 6 in two segments, a vote among them, each call synced; then a power cut that lost nothing."""
    files = SimFiles()
    log = open_still(files, _OPTIONS)
    stream = stream_of(log)
    log.turn()
    for index in range(1, _ENTRIES + 1):
        stream.append_entries((_entry(index),))
        log.turn()
    stream.append_vote(3, ReplicaId(2))
    log.turn()
    return files.copy(), sorted(p for p in files.paths() if sequence_of(p.name) is not None)


def _entry(index: int, size: int = 600) -> Entry:
    return entry(1, index, bytes([index]) * size)


def _look(files: SimFiles, size: int = 600) -> tuple[str, int]:
    """("ok", how many entries) or ("failed", 0) or ("refused", 0); wrong entries are an error."""
    try:
        log = open_still(files, _OPTIONS)
    except (Corrupt, Rejected):
        return "refused", 0
    if log.recovery.failed:
        return "failed", 0
    if not log.shared.states:
        return "ok", 0
    state = loaded(log.stream(next(iter(log.shared.states))))
    assert list(state.entries) == [_entry(i, size) for i in range(1, len(state.entries) + 1)]
    if len(state.entries) == _ENTRIES and state.hard_state.term == 3:
        return "ok", _ENTRIES
    assert state.hard_state.term == 0
    return "ok", len(state.entries)


def test_every_byte_flipped() -> None:
    """All was synced, and the last marker is there: so a flip anywhere is found, or touches nothing that counts."""
    files, paths = _written()
    silent = []
    tried = 0
    for path in paths:
        data = bytes(files.content(path))
        used = len(data.rstrip(b"\0"))
        # The zeros that fill a header's page are covered by one checksum: some of them stand for all.
        places = [i for i in range(used) if not 200 < i < HEADER_BYTES - 8 or i % 397 == 0]
        for at in places:
            if at % 5 and data[at] == data[at - 1] and at > HEADER_BYTES:
                continue  # inside a payload every fifth byte stands for its neighbours
            damaged = files.copy()
            damaged.content(path)[at] ^= 1 << (at % 8)
            verdict = _look(damaged)
            tried += 1
            if verdict not in (("failed", 0), ("refused", 0), ("ok", _ENTRIES)):
                silent.append((path.name, at, verdict))
    assert tried > 500
    assert not silent


@pytest.mark.parametrize("name", [METADATA, COPY])
def test_every_byte_of_the_metadata_flipped(name: str) -> None:
    """The other file stands in, and the damaged one is written anew."""
    files, _ = _written()
    path = DIRECTORY / name
    for at in range(len(files.content(path))):
        damaged = files.copy()
        damaged.content(path)[at] ^= 1 << (at % 8)
        assert _look(damaged) == ("ok", _ENTRIES), at
        assert damaged.content(path) == damaged.content(DIRECTORY / METADATA), at
        both = files.copy()
        for one in (METADATA, COPY):
            both.content(DIRECTORY / one)[at] ^= 1 << (at % 8)
        assert _look(both)[0] == "refused", at


def _no_space() -> NoReturn:
    raise OSError("no space for another segment")


def test_cut_at_every_length() -> None:
    """A log that overran a short file, so that any length may be what a crash left: a prefix, or a refusal."""
    files = SimFiles()
    log = open_still(files, _OPTIONS)
    log.shared.pool.fresh = _no_space  # type: ignore[method-assign]
    stream = stream_of(log)
    log.turn()
    for index in range(1, _ENTRIES + 1):
        stream.append_entries((_entry(index, 20),))
        log.turn()
    stream.append_vote(3, ReplicaId(2))
    log.turn()
    [path] = [p for p in files.paths() if sequence_of(p.name) is not None]
    data = bytes(files.content(path))
    counts = []
    for length in range(len(data) + 1):
        if length < HEADER_BYTES and length % 97:
            continue
        cut = files.copy()
        cut.set_content(path, data[:length])
        verdict, count = _look(cut, 20)
        assert verdict in ("ok", "failed", "refused")
        assert verdict == "ok" or length < HEADER_BYTES
        counts.append(count)
    assert counts == sorted(counts)
    assert counts[-1] == _ENTRIES
    assert set(counts) == set(range(_ENTRIES + 1))


@pytest.mark.parametrize("which", [0, 1])
def test_a_hole_of_zeros_anywhere(which: int) -> None:
    """A sector that reads as zeros, in either segment."""
    files, paths = _written()
    path = paths[which]
    data = bytes(files.content(path)).rstrip(b"\0")
    for at in range(0, len(data) - 600, 512):
        damaged = files.copy()
        damaged.content(path)[at : at + 512] = bytes(512)
        assert _look(damaged) in (("failed", 0), ("refused", 0), ("ok", _ENTRIES))

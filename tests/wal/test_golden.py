"""Logs written by earlier versions must be read by this one, for ever.

`python -m tests.wal.test_golden` writes the golden files of the current format; a file that is there is never changed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.wal import Log, LogOptions
from stele.wal.dump import describe
from stele.wal.dump import main as dump_main
from stele.wal.format import GROUP_ALIGN, GroupKind, encode_group
from tests.wal.support import CONFIG, NODE, entries, entry, key, loaded, run_all

GOLDEN = Path(__file__).parent / "golden"


def _options(compression: str | None) -> LogOptions:
    return LogOptions(segment_bytes=8 << 10, low_space_bytes=0, prepare=False, compression=compression)


def write(directory: Path, compression: str | None) -> None:
    """Every kind of record, a collection, a tombstone, several segments; closed in good order."""
    log = Log.open(directory, _options(compression), NODE, run_all, threads=False)
    one = log.create_stream(key(1), OPID_NONE, CONFIG)
    one.append_term(1)
    one.append_vote(2, ReplicaId(3))
    one.append_entries((Entry(2, 1, EntryKind.NOOP, 0, b""), entry(2, 2), entry(2, 3, b"stele" * 500)))
    log.turn()
    one.append_entries((entry(2, 4, b"more" * 500),))
    log.turn()
    one.pop_entries(4)
    one.append_entries(entries((3, 4), (3, 5), (3, 6)))
    one.append_promote(5, ReplicaId(2))
    two = log.create_stream(key(2, 7), OpId(4, 40), CONFIG)
    two.append_entries(
        (Entry(4, 41, EntryKind.CEILING, 5, b"\1" * 8), Entry(5, 42, EntryKind.CONFIG, 6, b"c"))
    )
    two.begin_snapshot(OpId(4, 41))
    two.end_snapshot(OpId(4, 41), CONFIG)
    gone = log.create_stream(key(3), OPID_NONE, CONFIG)
    gone.append_vote(9, ReplicaId(1))
    gone.append_entries(entries((9, 1), (9, 2)))
    log.turn()
    log.tombstone(key(3))
    log.create_stream(key(4), OPID_NONE, CONFIG)
    log.forget(key(4))
    log.turn()
    log.close()


def check(log: Log) -> None:
    assert not log.recovery.failed
    assert log.recovery.warnings == ()
    assert set(log.shared.states) == {key(1), key(2, 7), key(3)}
    one = loaded(log.stream(key(1)))
    assert (one.hard_state.term, one.hard_state.voted_for) == (5, 2)
    assert one.entries == (
        Entry(2, 1, EntryKind.NOOP, 0, b""),
        entry(2, 2),
        entry(2, 3, b"stele" * 500),
        *entries((3, 4), (3, 5), (3, 6)),
    )
    two = log.stream(key(2, 7))
    assert (two.start, two.config, two.last_opid) == (OpId(4, 41), CONFIG, OpId(5, 42))
    assert loaded(two).entries == (Entry(5, 42, EntryKind.CONFIG, 6, b"c"),)
    gone = log.stream(key(3))
    assert gone.tombstoned
    assert (gone.hard_state.term, gone.hard_state.voted_for, gone.last_opid) == (9, 1, OpId(9, 2))


VARIANTS = {"format-1-plain": None, "format-1-lz4": "lz4", "format-1-zstd": "zstd"}


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
@pytest.mark.parametrize("with_metadata", [True, False], ids=["with metadata", "from records alone"])
def test_golden_logs_are_read(name: str, with_metadata: bool, tmp_path: Path) -> None:
    directory = tmp_path / "wal"
    shutil.copytree(GOLDEN / name, directory)
    if not with_metadata:
        (directory / "metadata").unlink()
    log = Log.open(directory, _options(None), NODE, run_all, threads=False)
    check(log)
    log.close()
    log = Log.open(directory, _options(None), NODE, run_all, threads=False)
    check(log)
    log.close()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_what_is_written_today_reads_the_same(name: str, tmp_path: Path) -> None:
    write(tmp_path / "wal", VARIANTS[name])
    log = Log.open(tmp_path / "wal", _options(None), NODE, run_all, threads=False)
    check(log)
    log.close()


def test_dump_tells_all_of_a_golden_log(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(describe(GOLDEN / "format-1-plain"))
    for part in (
        "2.3 WRITE",
        "TOMBSTONED",
        "PROMOTE in term 5 for replica 2",
        "FOOTER",
        "SNAPSHOT_END at 4.41",
    ):
        assert part in text
    assert "DAMAGED" not in text
    assert dump_main([str(GOLDEN / "format-1-zstd")]) == 0
    assert "records" in capsys.readouterr().out
    assert dump_main(["/nowhere"]) == 2


@pytest.mark.parametrize("sizes", [(), (0,), (56, 1), (7, 8, 9), (100, 5000)])
def test_a_group_has_the_same_bytes_in_one_buffer_and_in_pieces(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoded() -> tuple[int, bytes, int, int]:
        pieces = [bytes([size % 251]) * size for size in sizes]
        buffers, length, crc = encode_group(
            GroupKind.RECORDS,
            pieces,
            len(sizes),
            segment_id=1,
            prev_segment_id=2,
            prev_crc=3,
            offset=4096,
            synced_offset=4096,
        )
        return len(buffers), b"".join(buffers), length, crc

    one, *joined = encoded()
    monkeypatch.setattr("stele.wal.format._PIECE_BYTES", 0)  # none is small
    many, *apart = encoded()
    assert one == 1 < many and joined == apart
    assert joined[1] == len(joined[0]) and joined[1] % GROUP_ALIGN == 0  # type: ignore[arg-type,operator]


if __name__ == "__main__":
    for variant, codec in VARIANTS.items():
        target = GOLDEN / variant
        if target.exists():
            print(f"{target} is there and stays as it is", file=sys.stderr)
        else:
            write(target, codec)

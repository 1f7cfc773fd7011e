"""What column files take on disk: the flights of the tutorial at most half of their rows' bytes, flushed or merged."""

from __future__ import annotations

from pathlib import Path

from bench.files import WAYS, Measured, binary, flights


def test_flights_take_at_most_half_of_their_bytes(tmp_path: Path) -> None:
    data = flights()
    measured = {way: Measured(data, wanted, tmp_path / "rows-00000001") for way, wanted in WAYS.items()}
    for each in measured.values():
        each.once()
        assert each.lowest_s.keys() == {"write", "scan", "two columns", "get", "first get"}
    assert measured["format 1"].share > 1.1
    assert measured["flushed"].share < 0.5 and measured["merged"].share < 0.36


def test_random_bytes_take_no_more_than_they_did(tmp_path: Path) -> None:
    data = binary()
    measured = {way: Measured(data, wanted, tmp_path / "rows-00000001") for way, wanted in WAYS.items()}
    for each in measured.values():
        each.once()
    assert measured["merged"].share <= measured["flushed"].share < 0.9 * measured["format 1"].share

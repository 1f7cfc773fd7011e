"""A quote of CSV that is not closed, or has text behind it, is refused with its line: Arrow would drop rows without a word."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stele.cli.csv_quotes import CheckedQuotes
from stele.cli.csv_rows import CsvFormat, schema_of_csv
from stele.cli.source import Input, Source
from stele.model.errors import Rejected
from tests.client.commands import runner
from tests.client.small import SCHEMA, small_cluster


def rows(path: Path) -> list[dict[str, object]]:
    source = Source(Input.of(str(path)), SCHEMA, CsvFormat())
    return [row for batch in source.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('id,name\n1,a\n2,"open\n' + "3,x\n" * 1_000, "line 3: a quote opens here and is not closed"),
        ('id,name\n1,"a\nb"\n2,"open', "line 4: a quote opens here and is not closed"),
        ('id,name\n1,5" x\n2,"open\n', "line 3: a quote opens here and is not closed"),
        ('id,name\n1,"', "line 2: a quote opens here and is not closed"),
        ('\ufeff"id,name\n', "line 1: a quote opens here and is not closed"),
        ('id,name\r1,a\r2,"""\r', "line 3: a quote opens here and is not closed"),
        ('id,name\n1,"5" screen\n2,x\n', "line 2: text follows the closing quote"),
        ('id,name\n1,5" x\n2,"5" screen\n', "line 3: text follows the closing quote"),
        (
            'id,name\n1,"open\n2,"b"\n3,"c"\n',
            "line 3: text follows the closing quote of a value that begins in line 2",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_quote_that_swallows_rows_is_refused(tmp_path: Path, text: str, said: str, packed: bool) -> None:
    """Of 1,001 rows one text was made, and the exit code was 0."""
    path = tmp_path / ("rows.csv.gz" if packed else "rows.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(Rejected, match=f"{path.name}: {said}"):
        rows(path)
    if not packed:  # as `--create` looks at it before it makes a table
        with pytest.raises(Rejected, match=f"{path.name}: {said}"):
            schema_of_csv(str(path), CsvFormat())


def test_quotes_by_the_book_and_quotes_in_bare_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeff"id","name"\n1,"a ""b"", c\n""d"\n2,""\n3,5" screen\n4,x""y\n"5",""""\n6,"z"')
    assert [row["name"] for row in rows(path)] == ['a "b", c\n"d', "", '5" screen', 'x""y', '"', "z"]


def by_the_book(text: bytes) -> bool:
    """The same judgement, byte by byte."""
    state = "begin"
    for byte in text.decode():
        if state == "quoted":
            state = "closing" if byte == '"' else "quoted"
        elif byte in ",\r\n":
            state = "begin"
        elif state == "closing":
            if byte != '"':
                return False
            state = "quoted"
        else:
            state = "quoted" if byte == '"' and state == "begin" else "bare"
    return state != "quoted"


@given(st.text('",\nab', max_size=24).map(str.encode), st.integers(12, 30))
@example(b'aaaaaaaaaaaaaaaa"', 16)  # a quote that begins a block, within a value without quotes
def test_quotes_are_judged_alike_however_the_file_is_cut_into_blocks(text: bytes, size: int) -> None:
    for block in (1_000, size):  # a value is refused that fills a block
        checked, read = CheckedQuotes(io.BytesIO(text), "t.csv", ","), b""
        try:
            while part := checked.read(block):
                read += part
            good = True
        except Rejected:
            good = False
        assert good == by_the_book(text) and (not good or read == text)


def test_a_value_in_quotes_that_fills_a_block_is_refused_before_all_of_the_file_is_read() -> None:
    file = io.BytesIO(b'1,a\n2,"open\n' + b"3,x\n" * 100)
    checked = CheckedQuotes(file, "t.csv", ",")
    assert checked.read(16) == b'1,a\n2,"open\n3,x\n'
    with pytest.raises(Rejected, match=r"t\.csv: line 2: a value in quotes is longer than"):
        checked.read(16)
    assert file.tell() == 48


def test_a_block_before_a_file_breaks_off_is_handed_on() -> None:
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if found := super().read(size):
                return found
            raise EOFError("cut")

    checked = CheckedQuotes(Breaks(b'1,"a"'), "t.csv", ",")
    assert checked.read(5) == b'1,"a"'
    with pytest.raises(EOFError):
        checked.read(5)


async def test_nothing_is_written_of_a_small_file_with_an_open_quote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q.csv"
    path.write_text('id,name\n1,a\n2,"open\n' + "3,x\n" * 1_000)
    async with small_cluster(tmp_path / "data") as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        run = runner(cluster, monkeypatch)
        code, out, err = await run("table", "load", "t", str(path))
        assert (code, out) == (2, "no row was written\n") and "q.csv: line 3: a quote opens here" in err, (
            out,
            err,
        )
        assert await table.scan().count() == 0
        code, _, err = await run("table", "load", "new", str(path), "--create", "--key", "id")
        assert code == 2 and "q.csv: line 3: a quote opens here" in err
        assert [info.name for info in await client.list_tables()] == ["t"]

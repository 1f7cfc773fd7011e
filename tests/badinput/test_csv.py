"""CSV with faults: each costs its own row and is told with its line, whatever stands around it."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest

from stele.cli.csv_rows import CsvFormat, Lines, read_csv, schema_of_csv
from stele.cli.faults import Faults
from stele.cli.source import Input, Source
from stele.model.block import RowError
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema

SCHEMA = Schema.make([("id", "int64"), ("n", "int8", True), ("s", "string", True)], ["id"])


def read(path: Path, schema: Schema = SCHEMA) -> tuple[list[dict[str, object]], Lines]:
    lines = Lines()
    rows = [
        row
        for batch in read_csv(str(path), str(path), schema, CsvFormat(), lines)
        for row in batch.to_pylist()
    ]
    return rows, lines


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_is_told_with_its_line(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    good, bad, text = [], {}, [b"id,n,s"]
    for line in range(2, 2_000):
        kind = rng.choices(
            ("good", "blank", "short", "long", "range", "text", "utf8"), (90, 3, 2, 2, 2, 2, 2)
        )[0]
        values = {
            "good": b"%d, 7,NA" % line,
            "blank": b"",
            "short": b"%d" % line,
            "long": b"%d,1,x,y" % line,
            "range": b"%d,300,x" % line,
            "text": b"%d,many,x" % line,
            "utf8": b"%d,1,\xff" % line,
        }[kind]
        text.append(values)
        if kind == "good":
            good.append(line)
        elif kind != "blank":
            bad[line] = kind
    path = tmp_path / "t.csv"
    path.write_bytes(b"\n".join(text) + b"\n\n")
    rows, lines = read(path)
    assert rows == [{"id": line, "n": 7, "s": None} for line in good]
    assert [lines.line_of(position) for position in range(len(good))] == good
    told = dict(lines.errors)
    assert sorted(told) == sorted(bad)
    wanted = {
        "short": "1 values; expected 3",
        "long": "4 values; expected 3",
        "range": "column n: '300' is not an int8",
        "text": "column n: 'many' is not an int8",
        "utf8": "column s: '\\\\xff' is not UTF-8",
    }
    assert told == {line: wanted[kind] for line, kind in bad.items()}


def test_every_type_is_read_and_refused(tmp_path: Path) -> None:
    cases = {
        "bool": ("true", "maybe"),
        "int64": ("-5", "1.5"),
        "double": ("1e3", "1,5"),
        "decimal(10,2)": ("1.25", "1.255"),
        "date": ("2013-01-31", "31.1.2013"),
        "timestamp": ("2013-01-31T05:00:00+02:00", "31.1.2013 05:00"),
        "binary": ("x", None),
    }
    for kind, (right, wrong) in cases.items():
        schema = Schema.make([("id", "int64"), ("v", kind, True)], ["id"])
        path = tmp_path / "t.csv"
        path.write_text(f'id,v\n1,{right}\n2,"{wrong or right}"\n3,NA\n')
        rows, lines = read(path, schema)
        assert [row["id"] for row in rows] == ([1, 3] if wrong else [1, 2, 3]), kind
        assert rows[0]["v"] is not None and rows[-1]["v"] is None
        assert [line for line, _ in lines.errors] == ([3] if wrong else [])


def test_a_day_is_a_number_only_with_its_sign(tmp_path: Path) -> None:
    """Such as `table scan` writes where there is no date; without a sign it is a date that lacks its hyphens."""
    schema = Schema.make([("id", "int64"), ("day", "date", True), ("at", "timestamp", True)], ["id"])
    path = tmp_path / "t.csv"
    path.write_text("id,day,at\n1,20240501,\n2,,1714521600000\n3,+99999999999,\n4,-1,+0\n")
    rows, lines = read(path, schema)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert rows == [{"id": 4, "day": datetime.date(1969, 12, 31), "at": epoch}]
    assert [line for line, _ in lines.errors] == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"1,a\n", "no columns '1', 'a'"),
        (b"1,a,b\n2,c,d\n", "no columns '1', 'a', 'b'"),
        (b"id,,n\n", "no column ''"),
        (b"id,\xff\n1,2\n", "is not UTF-8"),
        (b"id;n\n1;2\n", "Add --delimiter ';'"),
        (b"id\tn\ts\n", "Add --delimiter tab"),
        (b"id,n,s,id\n", "column 'id' appears twice"),
        (b"id,n,s,n,id\n1,2,3,4,5\n", "columns 'id', 'n' appear twice"),
    ],
)
def test_a_first_line_that_is_no_header_is_refused_also_without_rows(
    tmp_path: Path, text: bytes, words: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text)
    with pytest.raises(Rejected, match="line 1, which is the header") as caught:
        read(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_text_that_is_not_utf8_makes_no_column_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"id,s\n1,a\n2,gr\xfcn\n")
    with pytest.raises(Rejected, match=r'column s: "gr\\xfcn", row 2 below the header, is not UTF-8; save'):
        schema_of_csv(str(path), CsvFormat())


@pytest.mark.parametrize("good", [1, 200_000])
def test_a_line_that_is_not_utf8_and_lacks_values_is_refused_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], good: int
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"id,n,s\n" + b"7,8,abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz\n" * good + b"2\xff\n3,4,x\n"
    )
    said = f"line {good + 2} has 1 values, expected 3, and is not UTF-8"
    with pytest.raises(Rejected, match=said):
        read(path)
    with pytest.raises(Rejected, match=said):
        schema_of_csv(str(path), CsvFormat())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("begin", ["", "\ufeff"], ids=["plain", "bom"])
def test_lines_are_those_of_the_file_where_values_hold_ends_of_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begin: str, end: str
) -> None:
    """Rows were counted; and nobody said which rows went with a quote that is not closed."""
    text = (
        *(
            '"id",n,s',
            '2,1,"x""',
            "",
            'y"',
            "5,many,z",
            "",
            '7,"1',
            '",5"',
            '9,1,5"',
            '10,1,"x""y"',
            "11,1,2,3",
        ),
        *('12,300,"z', "13,1,x", '14,1,x"', "15,1"),
    )
    path = tmp_path / "t.csv"
    path.write_bytes((begin + end.join(text)).encode())
    source, faults = Source(Input.of(str(path)), SCHEMA, CsvFormat(("",))), Faults()
    ids = [row["id"] for batch in source.batches() for row in batch.to_pylist()]
    faults.add(source, [RowError(ids.index(9), Code.NOT_FOUND, "no")])
    faults.report()
    assert ids == [2, 7, 9, 10]
    assert capsys.readouterr().err.splitlines() == [
        "t.csv line 5: INVALID_ARGUMENT column n: 'many' is not an int8",
        "t.csv line 9: NOT_FOUND no",
        "t.csv line 11: INVALID_ARGUMENT 4 values; expected 3",
        "t.csv line 12: INVALID_ARGUMENT column n: '300' is not an int8 (quotes join lines 12 to 14 into one row: is a quote not closed?)",
        "t.csv line 15: INVALID_ARGUMENT 2 values; expected 3",
    ]


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,n\n")
    assert read(tmp_path / "t.csv")[0] == []

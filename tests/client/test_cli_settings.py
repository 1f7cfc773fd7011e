"""Options, settings and definitions: where they may stand, and what is said of bad ones; exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from stele.cli import app
from stele.cli.errors import EXIT_CODES, PROCESS_EXIT_CODES, error_line, exit_code, exit_codes_help
from stele.cli.processes import master_run, node_options, parse_first_masters
from stele.cli.schema_file import table_from_file, table_from_options
from stele.client import AsyncClient
from stele.model.errors import Advice, Rejected, SteleError
from stele.model.schema import Schema
from stele.rpc import logging
from stele.tserver import options
from tests.client.commands import runner
from tests.client.small import small_cluster


async def test_shared_options_stand_before_the_command_or_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]))
        run = runner(cluster, monkeypatch)
        here = ("--masters", cluster.master_address)
        wrong = ("--masters", "127.0.0.1:1", "--timeout", "20")
        monkeypatch.setenv("STELE_MASTERS", "127.0.0.1:1")  # what is given counts more
        for arguments in (
            (*here, "table", "scan", "t", "--count"),
            ("table", *here, "scan", "t", "--count"),
            ("table", "scan", "t", "--count", *here),
            (*wrong, "table", *here, "scan", "t", "--count"),
            (*wrong, "table", "scan", "t", "--count", *here),
        ):
            assert await run(*arguments) == (0, "0\n", ""), arguments
        assert json.loads((await run(*here, "--json", "table", "list"))[1])[0]["name"] == "t"
        code, _, err = await run("--timeout", "0.2", "table", "scan", "t")
        assert (code, err.partition(" (")[0]) == (75, "stele: UNAVAILABLE: no master answers at 127.0.0.1:1")
        for arguments, line in (
            (
                ("--json", "node", "run"),
                "stele node run takes no --json; see `stele node run --help`",
            ),
            (
                ("--timeout", "1", "table", "list"),
                "stele table list takes no --timeout; see `stele table list",
            ),
            (("table", "create", "u", "--timeout", "nan"), "Invalid value for '--timeout': nan: expected"),
            (("--timeout", "inf", "ksck"), "Invalid value for '--timeout': inf: expected"),
            ((*here, "node", "run"), "stele node run takes no --masters before the command"),
            (("--timeout", "0", "ksck"), "Invalid value for '--timeout': 0.0 is not in the range x>0"),
        ):
            code, _, err = await run(*arguments)
            assert code == 2 and err.startswith(f"stele: {line}"), err


async def test_next_steps_are_in_the_words_of_who_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", Schema.make([("id", "int64")], ["id"]))
        run = runner(cluster, monkeypatch)
        for call, arguments, python, shell in (
            (
                client.open_table("x"),
                ("table", "scan", "x"),
                "list_tables() shows",
                "`stele table list` shows",
            ),
            (
                client.describe("x"),
                ("table", "describe", "x"),
                "list_tables() shows",
                "`stele table list` shows",
            ),
            (client.describe("x"), ("tablet", "list", "--table", "x"), "list_tables()", "`stele table list`"),
            (client.keyspace("x"), ("kv", "list", "x"), "create_keyspace('x')", "`stele kv create x`"),
            (client.keyspace("t"), ("kv", "list", "t"), "open_table('t')", "`stele table scan t`"),
            (
                AsyncClient("127.0.0.1:1", first_contact_s=0.2).list_tables(),
                ("table", "scan", "t", "--timeout", "0.2", "--masters", "127.0.0.1:1"),
                "; check the addresses of the masters",
                "; check --masters",
            ),
        ):
            with pytest.raises(SteleError) as caught:
                await call
            assert python in str(caught.value) and "stele " not in str(caught.value)
            code, _, err = await run(*arguments)
            assert code == exit_code(caught.value) and shell in err and "()" not in err, err
    for advice in Advice:
        assert error_line(Rejected("no", advice=advice, name="n")).startswith("INVALID_ARGUMENT: no; ")
    with pytest.raises(Rejected, match="no masters are given; pass the HOST:PORT of some of them"):
        AsyncClient("")


def test_exit_codes_are_those_of_the_processes() -> None:
    wanted = {value for name, value in vars(options).items() if name.startswith("EXIT_")}
    assert set(PROCESS_EXIT_CODES) == wanted
    assert all(
        f"{code} {EXIT_CODES[code]}" in exit_codes_help(EXIT_CODES) for code in (0, 1, 2, 5, 70, 75, 130)
    )


def reader_left() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w", buffering=1)


@pytest.mark.parametrize(
    "stream",
    [lambda: open("/dev/full", "w", buffering=1), reader_left, lambda: None],  # noqa: SIM115
    ids=["full disk", "reader left", "closed"],
)
def test_what_cannot_be_told_ends_with_its_exit_code_all_the_same(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[], TextIO | None]
) -> None:
    """It was 1, which says no. Nor does a line of a node's log that nobody takes stop what the node is doing."""
    monkeypatch.setattr(sys, "stderr", stream())
    with pytest.raises(SystemExit) as ended:
        app.run(["nonsense"])
    logging.setup()
    structlog.get_logger("stele.test").error("a line")
    structlog.reset_defaults()
    with contextlib.suppress(OSError):
        sys.stderr.close()
    assert ended.value.code == 2


async def test_no_master_is_one_line_and_try_again_later() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", "ksck", "--masters", "127.0.0.1:1", "--timeout", "3"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 75
    assert err.decode().startswith(
        "stele: UNAVAILABLE: no master answers at 127.0.0.1:1 (connection refused)"
    )
    assert err.count(b"\n") == 1


async def test_a_process_with_a_bad_setting_says_what_to_do(tmp_path: Path) -> None:
    for arguments, wanted in (
        (("--data-dir", str(tmp_path), "--node-id", "x", "--cluster-id", "y"), "--node-id"),
        (("--data-dir", str(tmp_path)), "--node-id"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "node", "run", *arguments), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert process.returncode == 2
        assert wanted in err.decode()


def test_a_resource_of_another_kind_is_named_with_what_takes_it(tmp_path: Path) -> None:
    """It was told that 'columns' is missing."""
    examples = Path(__file__).parents[2] / "examples"
    cluster = examples / "cluster.yaml"
    with pytest.raises(Rejected) as caught:
        table_from_file(str(cluster))
    assert caught.value.args[0] == (
        f"{cluster}: line 3, kind: TabletCluster; expected a TabletGroup, or a mapping with columns and primaryKey; "
        f"create a TabletCluster with `kubectl apply -f {cluster}`"
    )
    other = tmp_path / "other.yaml"
    for kind, wanted in (
        ("ConfigMap", "line 1, kind: ConfigMap; expected a TabletGroup"),
        ("[1]", "line 1, kind: a list; expected TabletGroup$"),
    ):
        other.write_text(f"kind: {kind}\nspec: {{columns: [{{name: id, type: int64}}], primaryKey: [id]}}\n")
        with pytest.raises(Rejected, match=wanted) as caught:
            table_from_file(str(other))
        assert "kubectl" not in caught.value.args[0]
    other.write_text("kind: TabletGroup\nspec: {columns: [{name: id, type: int64}], primaryKey: [id]}\n")
    assert table_from_file(str(other)).schema.column_ids == (0,)


def test_definitions_with_all_their_faults(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("columns: [{name: id, type: int65}, {name: id, type: string}]\nprimaryKey: [id]\n")
    with pytest.raises(Rejected, match=r"(?s)int65.*twice"):
        table_from_file(str(bad))
    for text in (
        "[1]",
        "columns: 3",
        "columns: [{name: id}]\nprimaryKey: [id]",
        "{",
        "columns: []\nprimaryKey: []",
    ):
        bad.write_text(text)
        with pytest.raises(Rejected, match=r"bad\.yaml"):
            table_from_file(str(bad))
    bad.write_text(
        "columns: [{name: id, type: int64}, {name: n, type: int64, default: 1.5}]\nprimaryKey: [id]\n"
    )
    with pytest.raises(
        Rejected, match=r"bad\.yaml: line 1, columns\[1\]\.default: column n: the default 1.5 is not"
    ):
        table_from_file(str(bad))
    with pytest.raises(Rejected, match="--column id"):
        table_from_options("t", ["id"], "id", [])
    for hashes, words in (
        (["no:8", "id,zz:4"], "--hash no:8: no column 'no'; columns are id; --hash id,zz:4: no column 'zz'"),
        (["id:1"], "--hash id:1: 1 buckets; expected 2 or more"),
        (["id:2", "id:4"], r"partitioning: columns \['id'\] are in two hashes; expected each column in one"),
    ):
        with pytest.raises(Rejected, match=words):
            table_from_options("t", ["id:int64"], "id", hashes)
    for key, words in (("", "--key is missing"), ("idd", "--key idd: no column 'idd'; did you mean 'id'")):
        with pytest.raises(Rejected, match=words):
            table_from_options("t", ["id:int64"], key, [])
    with pytest.raises(Rejected, match="HEX32=HOST:PORT"):
        parse_first_masters("a=b")
    assert parse_first_masters("a" * 32 + "=h:1")[0].address == "h:1"


def test_a_default_in_a_file_is_the_number_that_stands_there(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        "columns: [{name: id, type: int64}, {name: a, type: double, default: 0.25},"
        " {name: b, type: 'decimal(38,20)', default: '0.1234567890123456789'}, {name: c, type: double, default: +0.5},"
        " {name: d, type: double, default: -.inf},"
        " {name: f, type: int64, default: 7}, {name: g, type: double, default: 1_000.25}]\nprimaryKey: [id]\n"
    )
    schema = table_from_file(str(file)).schema
    assert [(column.name, column.default) for column in schema.columns[1:]] == [
        ("a", "0.25"),
        ("b", '"0.1234567890123456789"'),
        ("c", "0.5"),
        ("d", "-Infinity"),
        ("f", "7"),
        ("g", "1000.25"),
    ]
    rounded = file.read_text().replace(
        "double, default: 0.25", "'decimal(38,20)', default: 0.1234567890123456789"
    )
    file.write_text(rounded.replace("default: +0.5", "default: 1.0e+400"))
    with pytest.raises(
        Rejected, match=r"(?s)column a: .*would be read as.*column c: .*1\.0E\+400 is not a double"
    ):
        table_from_file(str(file))


def test_a_first_master_tells_all_first_masters_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --masters it would tell nobody, and be silent to whoever leads."""
    a, b = "a" * 32, "b" * 32
    given = f"--data-dir d --node-id {a} --cluster-id {a} --first-masters {a}=h1:1,{b}=h2:2".split()
    monkeypatch.delenv("STELE_MASTERS", raising=False)

    def masters(*more: str) -> tuple[str, ...]:
        values = dict(master_run.make_context("run", [*given, *more]).params)
        first = parse_first_masters(values.pop("first_masters"))
        del values["log_format"], values["log_level"], values["drive_after"]
        return node_options(values, "master", first_masters=first).masters

    assert masters() == ("h1:1", "h2:2")
    assert masters("--masters", "h3:3") == ("h3:3",)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ("table", "scan", "t", "--snapshot", "noon"),
            "--snapshot noon: expected a hybrid time or an ISO 8601 time",
        ),
        (
            ("table", "scan", "t", "--snapshot", "2024-01-01T00:00:00.1234567"),
            "--snapshot 2024-01-01T00:00:00.1234567: expected a hybrid time or an ISO 8601 time (it is finer than",
        ),
        (
            ("table", "load", "t", "rows.parquet", "rows.txt"),
            "rows.txt: expected .csv, .csv.gz, .parquet, or .arrow",
        ),
    ],
    ids=["snapshot", "fine-snapshot", "suffix"],
)
def test_what_can_be_judged_without_a_cluster_is_judged_before_it_is_asked(
    command: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    for name in ("rows.parquet", "rows.txt"):
        (tmp_path / name).write_text("junk")
    done = subprocess.run(
        [sys.executable, "-m", "stele.cli", *command, "--masters", "127.0.0.1:1", "--timeout", "0.2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"stele: INVALID_ARGUMENT: {why}"), done.stderr


@pytest.mark.parametrize(
    ("words", "program"),
    [(["local", "up"], "`stele-local up`"), (["operator", "run"], "`stele-operator run`")],
)
def test_a_command_of_another_program_is_told_with_its_name(
    words: list[str], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.run(words)
    assert ended.value.code == 2 and f"is another program: {program};" in capsys.readouterr().err

"""Options that would do something else than they seem to say are refused before a cluster is asked."""

from __future__ import annotations

import sys

import pytest

from stele.cli import app


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("table scan t --columns id,id", "--columns id,id: 'id' is named twice; name each column once"),
        ("table scan t --columns id,id --format json", "--columns id,id: 'id' is named twice"),
        ("table scan t --where a=1 --where b=2", "--where is given 2 times; give it once"),
        ("table scan t --masters h:1 --masters h:2", "--masters is given 2 times; give it once"),
        ("table scan t --snapshot @", "--snapshot is empty; leave it out, or give it a value"),
        ("table scan t --where @", "--where is empty"),
        ("table scan t --where= --count", "--where is empty"),
        ("table scan t --columns @", "--columns is empty"),
        ("table load t x.csv --key @", "--key is empty"),
        ("table create t.yaml --name @", "--name is empty"),
        ("kv list s --prefix @", "--prefix is empty"),
        ("kv elect s n --id @", "--id is empty"),
        ("--masters h:1 --masters h:2 table list", "--masters is given 2 times; give it once"),
        ("table --masters h:1 --masters h:2 list", "--masters is given 2 times; give it once"),
        ("--timeout 1 --timeout 2 ksck", "--timeout is given 2 times; give it once"),
        ("--masters @ table list", "--masters is empty; leave it out, or give it a value"),
    ],
)
def test_an_option_that_is_empty_or_given_twice_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    """The last of two counted; an empty one, as of a shell variable that is not set, was as none: all rows, or those of now."""
    with pytest.raises(SystemExit) as ended:
        app.run([word.replace("@", "") for word in command.split()])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"stele: {said}")


def test_arrow_is_not_written_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes came as escapes, which no program reads, and no user."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit) as ended:
        app.run(["table", "scan", "t", "--format", "arrow", "--masters", "127.0.0.1:1", "--timeout", "0.1"])
    assert ended.value.code == 2
    said = "stele: Arrow is binary, and standard output is a terminal; add -o FILE, or a pipe;"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("table alter t --owner a --no-owner", "--owner and --no-owner exclude each other; give one of them"),
        (
            "table alter t --comment a --no-comment",
            "--comment and --no-comment exclude each other; give one of them",
        ),
        (
            "table alter t --default n=1 --no-default n",
            "column n has both --default and --no-default; give one of them",
        ),
        ("table drop t --now --keep 1h", "--now and --keep exclude each other; give one of them"),
        ("table scan t --json --format csv", "--json and --format csv exclude each other; give one of them"),
        (
            "table scan t --count -o x --format csv",
            "--count prints a number and cannot be used with --output; give one of them",
        ),
        (
            "backup restore f 2026 --at 2026-05-01",
            "BACKUP and --at exclude each other; give one of them",
        ),
        (
            "backup restore f --partitioning x --hash id:2",
            "--partitioning excludes --hash and --range; leave it out, or leave these out",
        ),
        (
            "backup remove f 2026 --json --json-progress",
            "--json and --json-progress exclude each other; give one of them",
        ),
        ("backup remove f 2026 --key k", "give either BACKUP or --key"),
        ("tablet recover 9a2e --all-lost", "give exactly one of TABLET, --table and --all-lost"),
        ("table alter t --rename a=b --rename a=c", "--rename a=c: a is given twice; give it once"),
        ("backup verify f --table a --table a", "--table a is given twice; give it once"),
        ("kv write s --put a 1 --delete a", "a is named twice to be changed; name each key once"),
        ("table load t - -", "INVALID_ARGUMENT: standard input (-) is named twice; name it once"),
    ],
)
def test_options_that_exclude_each_other_are_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.run(command.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"stele: {said}")

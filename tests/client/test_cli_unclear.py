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

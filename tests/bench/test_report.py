"""The table of the bench and the keys of --only. No time is measured here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.kudu_side import KuduCluster
from bench.measures import KEYS, announced, chosen
from bench.report import Report, milliseconds, percentile


def cells(report: Report) -> dict[str, list[str]]:
    """The lines of the table by the words in their first cell."""
    lines = [line for line in report.table().splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: line[1:] for line in split}


def small() -> Report:
    """Two measures: of the first the higher is better, of the second the lower."""
    report = Report()
    report.add("rate", "rows", "3k/s", "10k/s")
    report.add("time", "wait", "2 ms", "1 ms", rate=False)
    return report


def test_without_a_peer_there_is_no_column_of_one() -> None:
    report = small()
    report.put("rate", "2,000/s", 2_000)
    found = cells(report)
    assert found["measure"] == ["now at least", "design must allow", "Stele"]
    assert found["rows"] == ["3k/s", "10k/s", "2,000/s"]
    assert found["wait"] == ["2 ms", "1 ms", "not measured"]


def test_a_ratio_says_how_many_times_better_stele_is() -> None:
    report = small()
    report.put("rate", "2,000/s", 2_000)
    report.put("time", "2.0 ms", 0.002)
    report.put_peer("etcd", "rate", "1,000/s", 1_000)
    report.put_peer("Kudu 1.2", "time", "1.0 ms", 0.001)
    found = cells(report)
    assert found["measure"][3:] == ["etcd", "to etcd", "Kudu 1.2", "to Kudu 1.2"]
    assert found["rows"][2:] == ["2,000/s", "1,000/s", "2.0x", "-", "-"]
    assert found["wait"][2:] == ["2.0 ms", "-", "-", "1.0 ms", "0.5x"]


def test_what_does_not_compare_has_no_ratio() -> None:
    report = small()
    report.put("time", "p50 2.0 ms", 0.002)
    report.put_peer("Kudu", "time", "mean 3.0 ms")
    assert cells(report)["wait"][2:] == ["p50 2.0 ms", "mean 3.0 ms", "-"]


def test_notes_stand_below_the_table() -> None:
    report = small()
    report.notes.append("the measurement of Kudu failed: why")
    assert report.table().splitlines()[-1] == "the measurement of Kudu failed: why"
    assert "Kudu" not in "".join(cells(report)["measure"])


def test_what_nobody_asked_for_says_so_and_parts_go_with_their_whole() -> None:
    report = announced()
    report.put("p50", "1.0 ms", 0.001)
    report.put("copy", "9 MB/s", 9)
    report.leave_out(chosen("puts"))
    assert report.measures["p50"].stele.result == "1.0 ms"
    assert report.measures["puts"].stele.result == "not measured"
    assert report.measures["copy"].stele.result == "not asked for"


def test_every_key_is_a_row() -> None:
    measures = announced().measures
    assert set(KEYS) == {key for key, measure in measures.items() if not measure.of}
    assert all(measure.of in KEYS for measure in measures.values() if measure.of)


def test_only() -> None:
    assert chosen("") == frozenset(KEYS)
    assert chosen("puts, kill,,puts") == {"puts", "kill"}


def test_only_refuses_what_is_no_key() -> None:
    with pytest.raises(
        ValueError, match=r"^--only: no measure is called foo, bar; choose from bulk, puts, .*rest$"
    ):
        chosen("puts,foo,bar,foo")


def test_the_command_lists_the_keys_and_refuses_others_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    code, out, _ = run("--help")
    assert code == 0 and all(f"  {key:<8}{how}" in out for key, how in KEYS.items())
    code, out, err = run("--only", "foo")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = run("--directory", "/dev/null/nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_table_says_above_that_it_is_no_measurement(quick: bool) -> None:
    above = announced(quick=quick).table().partition("| measure")[0]
    assert ("NO MEASUREMENT" in above) is quick


def test_a_missing_piece_of_kudu_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SASL_PATH", raising=False)

    def missing() -> str:
        return KuduCluster(tmp_path, tmp_path / "data").missing()

    assert "kudu is not there; KUDU_HOME must name" in missing()
    (tmp_path / "bin").mkdir()
    for name in ("kudu", "kudu-master", "kudu-tserver"):
        (tmp_path / "bin" / name).touch(mode=0o644)
    assert "chmod +x" in missing()
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    assert "install libsasl2-modules and set SASL_PATH" in missing()
    (tmp_path / "lib" / "sasl2").mkdir(parents=True)
    (tmp_path / "lib" / "sasl2" / "libplain.so.3").touch()
    assert missing() == ""


def test_numbers_for_people() -> None:
    assert [milliseconds(s) for s in (0.0012, 0.5, 1.234)] == ["1.2 ms", "500.0 ms", "1.23 s"]
    assert [percentile([3, 1, 2, 4], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 4, 4]

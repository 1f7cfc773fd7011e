"""The measures, their keys, and the choice of some of them. Called by __main__; pure.

Invariant: every key that `--only` takes is a row of the table, and the row is the same for every system.
"""

from __future__ import annotations

from bench.report import Report

# key of --only: how it is measured, in one line. bench/README.md has more.
KEYS = {
    "bulk": "4M rows of 100 bytes, in blocks of 8,192, into 8 tablets of three replicas",
    "puts": "64 callers, each with one put at a time; also p50 and p99",
    "one": "one caller with one put at a time",
    "gets": "64 callers, each with one get of a random row of the 4M at a time (loads them first); also p50",
    "many": "get_many of 10,000 random keys of the 4M rows at a time (loads them first)",
    "kill": "kill -9 of a leader, until the next write to its tablet is acknowledged",
    "copy": "a tablet of 3M rows to a node that has none of it",
    "scan": "all columns of the 4M rows, to Arrow (loads them first)",
    "narrow": "two narrow columns of the 4M rows, to Arrow (loads them first)",
    "few": "scans of two neighbouring keys of the 4M rows, by a predicate (loads them first)",
    "some": "scans of 1,000 of the 4M rows, by a predicate on a column that is not in the key (loads them first)",
    "rest": "resident memory of a node at rest and, in a cluster of stele_local, of the operator",
}


_QUICK = (
    "--quick, a tenth of the rows and a fifth of the time, shows that all of it works. "
    "Its figures are NO MEASUREMENT; run without --quick for those."
)


def announced(*, quick: bool = False) -> Report:
    """A report of all measures in the project's plan, with nothing measured yet."""
    report = Report(warning=_QUICK if quick else "")
    report.add("bulk", "bulk load, RF 3, rows of 100 bytes in blocks of 8,192", "300k rows/s", "1M rows/s")
    report.add("puts", "puts with 64 callers on 8 tablets", "15k/s", "40k/s")
    report.add("p50", "... p50", "", "1.6 ms", rate=False, of="puts")
    report.add("p99", "... p99", "", "4 ms", rate=False, of="puts")
    report.add("one", "one caller", "p50 1.5 ms", "p50 0.75 ms", rate=False)
    report.add("gets", "gets of random rows with 64 callers on 8 tablets", "10x etcd", "")
    report.add("get50", "... p50", "", "", rate=False, of="gets")
    report.add("many", "get_many of 10,000 random keys at a time", "", "100k keys/s")
    report.add("kill", "kill -9 of a leader to the next write: median, worst", "0.6 s", "0.25 s", rate=False)
    report.add("copy", "tablet copy", "200 MB/s", "380 MB/s")
    report.add("scan", "scan to Arrow, all columns", "5M rows/s", "15M rows/s")
    report.add("narrow", "scan to Arrow, two narrow columns", "10M rows/s", "40M rows/s")
    report.add("few", "scan of two neighbouring keys, by a predicate: p50, worst", "", "5 ms", rate=False)
    report.add("some", "scan of 1,000 rows, by values that rise with the key: p50, worst", "", "", rate=False)
    report.add(
        "rest",
        "a node at rest; the operator",
        "150 MB; 200 MB",
        "120 MB; 130 MB",
        rate=False,
    )
    return report


def chosen(text: str) -> frozenset[str]:
    """The measures that `--only` names, separated by commas; all for an empty text.

    Raises: ValueError: for unknown keys; one line that names the known ones.
    """
    named = [key.strip() for key in text.split(",") if key.strip()]
    unknown = [key for key in dict.fromkeys(named) if key not in KEYS]
    if unknown:
        raise ValueError(f"--only: no measure is called {', '.join(unknown)}; choose from {', '.join(KEYS)}")
    return frozenset(named or KEYS)

"""`python -m stele_spark.submit`: runs a program of apps/ with this installation's spark-submit. Used by the
operator's Jobs.

It finds spark-submit, the program's file, Java and Python, so that a caller need not know where they are.
Invariant: this process becomes spark-submit, so its exit status is that of the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stele_spark.session import find_java_home

PROGRAMS = ("backup", "restore", "verify")
TEMPLATE_FILE = "/tmp/executor.json"
"""The file for the template of executors' pods on Kubernetes. Its content comes from the variable
STELE_EXECUTOR_POD.
"""
_FLAGS = ("--verbose", "-v", "--supervise")
"""Options of spark-submit that take no value."""
_USAGE = f"usage: python -m stele_spark.submit [OPTION OF SPARK-SUBMIT]... {'|'.join(PROGRAMS)} [ARGUMENT]..."


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split the words into options of spark-submit, the program, and the program's arguments.

    Raises:
        ValueError: no program is named.
    """
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 1 if words[at] in _FLAGS or "=" in words[at] else 2
    if at >= len(words) or words[at] not in PROGRAMS:
        raise ValueError(_USAGE)
    return list(words[:at]), words[at], list(words[at + 1 :])


def command(words: Sequence[str]) -> list[str]:
    """The command to run for these words."""
    import pyspark

    options, program, arguments = split(words)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    return [str(submit), *options, str(Path(__file__).parent / "apps" / f"{program}.py"), *arguments]


def main() -> None:
    """Become spark-submit. Exits with 2 if the words are wrong."""
    try:
        run = command(sys.argv[1:])
    except (ValueError, ImportError, RuntimeError) as exc:
        sys.stderr.write(f"stele_spark.submit: {exc}\n")
        sys.exit(2)
    java = str(find_java_home())
    own = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    if template := os.environ.get("STELE_EXECUTOR_POD"):
        Path(TEMPLATE_FILE).write_text(template)
    os.execve(run[0], run, {**os.environ, **own, "JAVA_HOME": java})


if __name__ == "__main__":
    main()

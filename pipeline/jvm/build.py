"""Builds the JVM reader with Maven: `python pipeline/jvm/build.py JAR [--if-possible]`. Called by the
Makefile.

With --if-possible it also exits with 0 if Maven cannot reach its registry. Code that does not compile always
fails. `python pipeline/jvm/build.py --check` exits with 1 if Maven or Java 17 is missing. In each case it
prints why there is no reader.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
JAVA_OLDEST = 17
_WITHOUT = "What needs it goes on without it, and its tests are skipped"
_NO_REGISTRY = re.compile(r"Could not (transfer|resolve|find) |Non-resolvable|cannot be (resolved|reached)")
"""Parts of Maven's output when it gets nothing from its registry."""


def missing() -> str:
    """Which needed tool this machine lacks, in words; "" if it has all."""
    if shutil.which("mvn") is None:
        return "there is no Maven (mvn)"
    home = os.environ.get("JAVA_HOME")
    javac = shutil.which("javac", path=f"{home}/bin" if home else None)
    if javac is None:
        return "there is no Java compiler (javac)"
    told = subprocess.run([javac, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r"javac (\d+)", told.stdout + told.stderr)
    if found is None or int(found.group(1)) < JAVA_OLDEST:
        return f"{javac} is older than Java {JAVA_OLDEST}"
    return ""


def build() -> tuple[int, str]:
    """Run Maven. Returns its exit status, and what it printed."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    words = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "package", f"-Dpyspark.jars={jars}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def main(words: list[str]) -> int:
    """Run the command line. Returns the exit status."""
    why = missing()
    if words == ["--check"]:
        if why:
            say(f"{why}. {_WITHOUT}")
        return int(bool(why))
    jar, *options = words
    if not why:
        status, told = build()
        sys.stderr.write(told)
        if not status:
            Path(jar).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HERE / "target" / "stele-spark.jar", jar)
            return 0
        if _NO_REGISTRY.search(told) is None:
            say("Maven failed, as it says above")
            return 1
        why = "Maven did not get what it needs from its registry"
    if options != ["--if-possible"]:
        say(why)
        return 1
    say(f"{why}. {_WITHOUT}")
    Path(jar).unlink(missing_ok=True)  # it may be older than the code
    return 0


def say(why: str) -> None:
    """Tell users what they do without."""
    sys.stderr.write(f"The JVM reader for Spark is not built: {why} (docs/spark.md).\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

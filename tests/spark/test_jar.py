"""How the jar of the JVM reader is built, and that users get it: real Maven, a real wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stele_spark.session import JAR
from tests.spark.readers import need_jar

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "pipeline" / "jvm" / "build.py"
NO_REGISTRY = """<settings><mirrors><mirror>
  <id>nobody</id><mirrorOf>*</mirrorOf><url>https://127.0.0.1:9/</url>
</mirror></mirrors></settings>"""


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, str(BUILD), *words)
    return subprocess.run(words, env=os.environ | env, capture_output=True, text=True, check=False)


def test_without_maven_or_a_compiler_it_says_what_is_missing(tmp_path: Path) -> None:
    none = run("--check", PATH=str(tmp_path), JAVA_HOME="")
    assert none.returncode == 1
    assert none.stderr.startswith("The JVM reader for Spark is not built: there is no Maven (mvn)."), (
        none.stderr
    )
    mvn, javac = tmp_path / "mvn", tmp_path / "javac"
    mvn.touch(0o755)
    assert "there is no Java compiler" in run("--check", PATH=str(tmp_path), JAVA_HOME="").stderr
    for told, status in (("javac 11.0.2", 1), ("javac 17.0.15", 0)):
        javac.write_text(f"#!/bin/sh\necho {told}\n")
        javac.chmod(0o755)
        found = run("--check", PATH=str(tmp_path), JAVA_HOME="")
        assert (found.returncode, "is older than Java 17" in found.stderr) == (status, status == 1), told


def test_without_a_registry_tests_go_on_and_say_so(tmp_path: Path) -> None:
    if run("--check").returncode:
        pytest.skip("no Maven and Java 17 on this machine")
    home, jar = tmp_path / ".m2", tmp_path / "stele-spark.jar"
    home.mkdir()
    (home / "settings.xml").write_text(NO_REGISTRY)
    jar.touch()
    done = run(str(jar), "--if-possible", MAVEN_OPTS=f"-Duser.home={tmp_path}")
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "Maven did not get what it needs from its registry. What needs it goes on without it" in last
    assert not jar.exists(), "a jar that may be older than the code is not tested"


def test_a_wheel_has_the_jar_if_it_is_built(tmp_path: Path) -> None:
    need_jar()
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = opened.read("stele_spark/jars/stele-spark.jar")
        assert "pyspark_stele/__init__.py" in opened.namelist()
    assert found == JAR.read_bytes()

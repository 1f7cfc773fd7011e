"""Copies of the tree in which faults are planted, and pytest in them. Never touches the tree that it copies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import ROOT, Fault

_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".demo", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "*.egg-info"
)
_SOURCES = ("node", "operator", "pipeline", "tools/stele_local")
JAR, BUILD = "pipeline/stele_spark/jars/stele-spark.jar", "pipeline/jvm/build.py"
_STOP_S = 10.0
_SAW = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_FAILED, _PASSED = 1, 0
"""Exit codes of pytest. Any other one says that no test has judged: a fault that is no program, a test that is not there."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault. `saw`: the test that failed, or the one that hung; "" if all passed."""

    fault: Fault
    saw: str
    seconds: float
    broken: str = ""
    """What kept the tests from judging at all, for people."""

    @property
    def survived(self) -> bool:
        """Whether no test has seen it."""
        return not self.saw


class Tree:
    """A copy of the whole tree in `directory`; one fault at a time is planted in it."""

    def __init__(self, directory: Path, root: Path = ROOT) -> None:
        self.directory = directory
        shutil.copytree(root, directory, ignore=_LEFT_OUT, symlinks=True)
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(directory / source) for source in _SOURCES),
        }
        # Bytecode is kept: a run of a few tests takes longer to compile all of Stele than to judge.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the tree within the block."""
        path, jar = self.directory / fault.file, self.directory / JAR
        text = path.read_text()
        built = jar.read_bytes() if fault.is_java else b""
        if text.count(fault.old) != 1:
            raise ValueError(
                f"{fault.file}: {fault.old!r} stands {text.count(fault.old)} times, expected once"
            )
        self._write(path, text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            self._write(path, text)
            if built:
                jar.write_bytes(built)

    def _build(self) -> str:
        """Build the JVM reader. Returns what Maven said if it failed."""
        words = [sys.executable, BUILD, JAR]
        done = subprocess.run(words, cwd=self.directory, capture_output=True, text=True, check=False)
        return f"the jar was not built:\n{done.stderr[-3000:]}" if done.returncode else ""

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Python takes bytecode for current by the source's size and second.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def judge(self, fault: Fault, limit_s: float) -> Verdict:
        """Plant the fault and run its tests until one fails."""
        begun = time.monotonic()
        with self.planted(fault):
            if fault.is_java and (told := self._build()):
                return Verdict(fault, "", time.monotonic() - begun, told)
            code, output = self.run(fault.tests, limit_s)
        seconds = time.monotonic() - begun
        if code is None:
            return Verdict(fault, f"(hung for {limit_s:.0f} s)", seconds)
        found = _SAW.search(output)
        if code == _FAILED and found is not None:
            return Verdict(fault, found.group(1), seconds)
        if code == _PASSED:
            return Verdict(fault, "", seconds)
        return Verdict(fault, "", seconds, f"pytest ended with {code}:\n{output[-3000:]}")

    def failing(self, tests: tuple[str, ...], limit_s: float) -> tuple[str, ...]:
        """Those of these node ids that fail or err; all if they do not end in time, or pytest cannot run them."""
        code, output = self.run(tests, limit_s, until_one_fails=False)
        if code == _PASSED:
            return ()
        return tuple(_SAW.findall(output)) if code == _FAILED else tests

    def run(
        self, tests: tuple[str, ...], limit_s: float, *, until_one_fails: bool = True
    ) -> tuple[int | None, str]:
        """Exit code of pytest, None if it hung, and what it printed."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        if until_one_fails:
            command.append("-x")
        with subprocess.Popen(
            command,
            cwd=self.directory,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                self._end(process)
                return None, ""
            finally:
                self._end(process)
            return process.returncode, output

    def _end(self, process: subprocess.Popen[str]) -> None:
        """First as `timeout` does, so that tests end what they started; then whatever is left of its session."""
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

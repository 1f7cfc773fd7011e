"""Compiles the modules that handle every message and every write, with mypyc, from the same source that Python runs.

    python tools/compile.py build/compiled        # a copy of the package, compiled there
    PYTHONPATH=build/compiled stele --version

`STELE_COMPILE=1 pip install .` makes a wheel with them, by the hook below. Both need a C compiler. pyproject.toml lists the
modules ([tool.stele.compiled]); docs/compiled.md says what belongs there, and what it gains.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ["mypy>=2.4", "setuptools>=80", "types-protobuf", "types-grpcio", "types-PyYAML"]
"""What the hook installs for the time of the build. mypyc is a part of mypy."""
_MARK = ".made-by-compile"
"""A file in each directory that this program has made, and may remove."""
_SET_UP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
into, level, config, *modules = sys.argv[1:]
options = [f"--config-file={config}", "--explicit-package-bases", "--ignore-missing-imports"]
libraries = mypycify(
    options + modules, opt_level=level, debug_level="0", target_dir=into + "/c", group_name="stele.native", multi_file=True
)
for library in libraries:
    library.include_dirs.append(into + "/c/stele")  # mypyc looks for the headers of a group with a dotted name one folder up
setup(
    name="stele",
    ext_modules=libraries,
    script_args=["-q", "build_ext", "--build-lib", ".", "--build-temp", into + "/o", "--parallel", "2"],
)
"""


def modules() -> list[str]:
    """Paths of the listed modules, below `node`.

    Raises:
        SystemExit: a line of the list names nothing, or a module that must not be compiled.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed: list[str] = tomllib.load(file)["tool"]["stele"]["compiled"]["modules"]
    found: list[str] = []
    for line in listed:
        paths = sorted(path for path in (ROOT / "node").glob(line) if path.name != "__init__.py")
        if not paths:
            raise SystemExit(f"pyproject.toml, [tool.stele.compiled]: {line} names no module")
        for path in paths:
            for number in waits_within(path.read_text()):
                raise SystemExit(
                    f"{path}:{number} waits within a block, so it must not be compiled: docs/compiled.md"
                )
        found += [str(path.relative_to(ROOT / "node")) for path in paths]
    return found


def waits_within(source: str) -> list[int]:
    """Lines where a coroutine waits within `try` or `with`. mypyc 2.4 loses the error that ends such a wait now and then."""
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)

    def waiting(part: ast.AST) -> bool:
        return isinstance(part, waits) or (isinstance(part, ast.comprehension) and bool(part.is_async))

    lines = []
    for block in ast.walk(ast.parse(source)):
        if isinstance(block, ast.Try | ast.TryStar | ast.With | ast.AsyncWith | ast.AsyncFor):
            lines += [block.lineno] if any(map(waiting, ast.walk(block))) else []
    return lines


def compile_into(directory: Path, *, level: str = "2") -> Iterator[Path]:
    """Copy the package `stele` into `directory` and compile it there. Gives the path of each library, below `directory`.

    `level`: how hard the C compiler tries, "0" to "3".

    Raises:
        SystemExit: as `modules`; the directory has files, and is not of an earlier call.
        CalledProcessError: mypyc or the C compiler failed. They have said why.
    """
    listed = modules()
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARK).exists():
        raise SystemExit(f"{directory} has files, and this program did not make it; name a new directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / _MARK).touch()
    shutil.copytree(
        ROOT / "node" / "stele", directory / "stele", ignore=shutil.ignore_patterns("__pycache__")
    )
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", _SET_UP, scratch, level, str(ROOT / "pyproject.toml"), *listed]
        subprocess.run(command, check=True, cwd=directory, env={**os.environ, "MYPYPATH": str(directory)})
    shutil.rmtree(directory / ".mypy_cache", ignore_errors=True)
    for path in sorted(directory.rglob("*.so")):
        yield path.relative_to(directory)


class CompileHook(BuildHookInterface[Any]):
    """Adds the libraries to a wheel if STELE_COMPILE is 1. The modules' sources stay in it."""

    @property
    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("STELE_COMPILE") == "1"

    def dependencies(self) -> list[str]:
        """What the build needs."""
        return NEEDS if self._wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed. An editable install stays as it is."""
        if not self._wanted or version == "editable":
            return
        self._scratch = tempfile.TemporaryDirectory()
        directory = Path(self._scratch.name)
        for library in compile_into(directory):
            build_data["force_include"][str(directory / library)] = str(library)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory",
        type=Path,
        help="where to put the compiled copy: a new directory, or that of an earlier call",
    )
    parser.add_argument(
        "--level", default="2", choices="0123", help="how hard the C compiler tries (default 2)"
    )
    arguments = parser.parse_args()
    try:
        count = sum(1 for _ in compile_into(arguments.directory, level=arguments.level))
    except subprocess.CalledProcessError:
        sys.exit("it was not compiled; the lines above say why")
    print(f"{count} libraries in {arguments.directory}")


if __name__ == "__main__":
    main()

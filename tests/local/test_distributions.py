"""The wheels: each holds its own packages and no other's, and says what it needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import stele

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both, by the name of their distribution, built as `pip install . ./tools/stele_local` does."""
    folder = tmp_path_factory.mktemp("wheels")
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder)]
    built = subprocess.run([*words, ".", "./tools/stele_local"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}


def _described(wheel: zipfile.ZipFile, file: str) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/{file}"))
    return Parser().parsestr(wheel.read(name).decode())


def test_each_wheel_holds_its_own_packages(wheels: dict[str, zipfile.ZipFile]) -> None:
    packages = {
        name: {path.split("/")[0] for path in wheel.namelist() if ".dist-info/" not in path}
        for name, wheel in wheels.items()
    }
    assert packages == {
        "stele_store": {"stele", "stele_operator", "stele_spark", "pyspark_stele"},
        "stele_local": {"stele_local"},
    }
    store, local = set(wheels["stele_store"].namelist()), set(wheels["stele_local"].namelist())
    assert {"stele/py.typed", "stele/cli/app.py", "stele/rpc/proto/master_pb2.py"} <= store
    assert {"stele_local/py.typed", "stele_local/names/sitecustomize.py", "stele_local/__main__.py"} <= local
    assert [path for path in store | local if "__pycache__" in path] == []


def test_each_wheel_says_its_version_licence_programs_and_needs(wheels: dict[str, zipfile.ZipFile]) -> None:
    programs = {
        "stele_store": {"stele", "stele-operator", "stele-backup", "stele-restore", "stele-verify"},
        "stele_local": {"stele-local"},
    }
    for name, wheel in wheels.items():
        about = _described(wheel, "METADATA")
        assert about["Name"] == name.replace("_", "-")
        assert (about["Version"], about["License-Expression"]) == (stele.__version__, "Apache-2.0")
        scripts = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
        assert {line.split(" = ")[0] for line in scripts.splitlines() if " = " in line} == programs[name]
    needs = _described(wheels["stele_local"], "METADATA").get_all("Requires-Dist") or []
    assert f"stele-store[operator]=={stele.__version__}" in needs
    extras = _described(wheels["stele_store"], "METADATA").get_all("Provides-Extra")
    assert extras == ["demo", "dev", "docs", "hdfs", "operator", "spark"]

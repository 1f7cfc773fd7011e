"""What the distribution says of itself: one version, a licence, types for whoever checks theirs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import stele
from tests.upgrade.release import TAG

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_there_is_one_version() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "node/stele/__init__.py"
    chart = yaml.safe_load((ROOT / "charts/stele/Chart.yaml").read_text())
    assert chart["appVersion"] == stele.__version__
    assert chart["version"] == stele.__version__.replace(".dev", "-dev"), "semantic, as Helm wants it"
    local = tomllib.loads((ROOT / "tools/stele_local/pyproject.toml").read_text())
    assert (ROOT / "tools/stele_local" / local["tool"]["hatch"]["version"]["path"]).samefile(stele.__file__)
    assert f"stele-store[operator]=={stele.__version__}" in local["project"]["dependencies"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    if ".dev" not in stele.__version__:
        assert headings[1] == stele.__version__
        return
    assert f"v{headings[1]}" == TAG and f"v{stele.__version__}" > TAG, (
        "the next version, after the release before"
    )


def test_the_licence_is_there_whole_and_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 190
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0" and project["authors"] == [{"name": "The Stele authors"}]
    assert "urls" not in project  # an address in it would have to exist


def test_every_package_says_that_it_is_typed() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [name for name in packages if not (ROOT / name / "py.typed").exists()] == []

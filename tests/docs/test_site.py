"""`make docs` builds a site in which every link and every anchor leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT


def build(tree: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does, of the tree and into the folder that are given."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(to)],
        cwd=tree,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


def test_the_site_is_built_with_all_its_links(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert {"index.html", "design/index.html", "code/node/stele/raft/index.html"} <= pages
    assert 'href="../code/node/stele/wal/"' in (tmp_path / "design" / "index.html").read_text()
    assert (tmp_path / "code" / "examples" / "cluster.yaml").read_text() == (
        ROOT / "examples" / "cluster.yaml"
    ).read_text()

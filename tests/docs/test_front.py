"""The front page leads to everything: each page and each of thirty questions is two clicks away at most."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

from tests.docs.blocks import ROOT
from tests.docs.test_code import PARTS

FRONT = ROOT / "README.md"
CLICKS = 2
READERS = ("I run clusters", "I work with data", "I change the code")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LIMITS_LINES_MAX = 30
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@cache
def links(page: Path) -> tuple[tuple[Path, str], ...]:
    """(page, anchor) of each link to a file of this repository."""
    text = FENCED.sub("", page.read_text())
    found = [(target, anchor) for target, anchor in LINK.findall(text) if ":" not in target]
    return tuple(((page.parent / target).resolve() if target else page, anchor) for target, anchor in found)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub and the site make them."""
    slug = slugify(case="lower")
    return {
        slug(re.sub(r"[`*]", "", title), "-") for title in HEADING.findall(FENCED.sub("", page.read_text()))
    }


def clicks() -> dict[Path, int]:
    """How many clicks away from the front page each page is."""
    found, waiting = {FRONT: 0}, [FRONT]
    while waiting:
        page = waiting.pop(0)
        for target, _ in links(page):
            if target not in found and target.is_file():
                found[target] = found[page] + 1
                if target.suffix == ".md":
                    waiting.append(target)
    return found


@pytest.mark.parametrize(
    "page", [*PAGES, *(p / "README.md" for p in PARTS)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_page_is_two_clicks_away(page: Path) -> None:
    assert clicks().get(page, 99) <= CLICKS


@pytest.mark.parametrize("reader", READERS)
def test_ten_questions_of_each_reader_are_answered_two_clicks_away(reader: str) -> None:
    index = ROOT / "docs" / "index.md"
    assert clicks()[index] == 1
    part = index.read_text().partition(f"\n## {reader}\n")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in part.splitlines() if row.startswith("| ") and "?" in row]
    assert len(rows) == 10
    for _, answer in rows:
        assert LINK.search(answer), answer


@pytest.mark.parametrize(
    "page",
    [FRONT, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_link_leads_somewhere(page: Path) -> None:
    """As a checkout is browsed; `make docs` judges the site."""
    lost = [f"{target}#{anchor}" for target, anchor in links(page) if not target.exists()]
    lost += [
        f"{target}#{anchor}"
        for target, anchor in links(page)
        if anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
    ]
    assert lost == []


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "tools" / "picture.py"))
    assert drawn["PICTURE"].read_text() == drawn["picture"](), "run python docs/tools/picture.py"


def test_limits_are_few() -> None:
    assert len((ROOT / "docs" / "limits.md").read_text().splitlines()) <= LIMITS_LINES_MAX

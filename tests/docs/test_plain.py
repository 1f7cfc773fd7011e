"""Documents for people are in plain English: no sentence is so long that it must be read twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.prose import markdown, sentences

WORDS_MAX = 25
"""As CONTRIBUTING asks."""
WHERE = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md"),
    *("node/stele/*/README.md", "operator/**/README.md", "tools/**/README.md", "pipeline/**/README.md"),
    *("charts/*/README.md", "bench/README.md", "tests/*/README.md"),
)
PAGES = [page for pattern in WHERE for page in sorted(ROOT.glob(pattern))]
CODE = sorted(
    part
    for parts in (
        "node/stele",
        "operator/stele_operator",
        "tools/stele_local/stele_local",
        "pipeline/stele_spark",
    )
    for part in [ROOT / parts, *(ROOT / parts).rglob("*")]
    if part.is_dir() and any(part.glob("*.py")) and "proto" not in part.parts
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page: Path) -> None:
    long = [each for each in sentences(page.read_text()) if each.words > WORDS_MAX]
    assert [f"line {each.line}, {each.words} words: {each.text}" for each in long] == []


def docstrings(module: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring: of the module, of classes and functions, and below attributes."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


@pytest.mark.parametrize("folder", CODE, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_sentence_of_a_docstring_is_too_long(folder: Path) -> None:
    long = [
        f"{module.name}, docstring at line {line}, {each.words} words: {each.text}"
        for module in sorted(folder.glob("*.py"))
        for line, text in docstrings(module)
        for each in sentences(markdown(text))
        if each.words > WORDS_MAX
    ]
    assert long == []


def test_a_docstring_is_read_without_its_code() -> None:
    text = """Do it, once. `a`: what.

    Later:

        first line
        second line

    Args:
        one: The first one.
            It goes on.
        two: The other.

    Example:
        >>> do(1)
        2
    """
    assert [each.text for each in sentences(markdown(text))] == [
        *("Do it, once.", "Code: what.", "Later", "one: The first one.", "It goes on.", "two: The other."),
    ]


@pytest.mark.parametrize("pattern", WHERE)
def test_each_pattern_finds_a_page(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


def test_sentences_are_found_in_paragraphs_items_and_cells() -> None:
    page = (
        "# A title\n\nOne two\nthree. Four (see [five six](a.md)). What is 1.5 `x y`?\n\n- an item: it\n  goes on\n"
        "- another\n\n```\nno. sentence\n```\n\n| cell one | two |\n|---|---|\n| a. B | `c \\| d` |\n"
    )
    assert [(each.line, each.text, each.words) for each in sentences(page)] == [
        (1, "A title", 2),
        (3, "One two three.", 3),
        (3, "Four (see five six).", 4),
        (3, "What is 1.5 Code?", 4),
        (6, "an item: it goes on", 5),
        (8, "another", 1),
        (14, "cell one", 2),
        (14, "two", 1),
        (16, "a.", 1),
        (16, "B", 1),
        (16, "Code", 1),
    ]


def test_a_mark_inside_a_line_begins_no_item() -> None:
    found = [each.text for each in sentences("**One.** Two 9. Three - four.\n")]
    assert found == ["**One.", "Two 9.", "Three - four."]

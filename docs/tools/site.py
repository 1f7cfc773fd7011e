"""Hooks of the site that `make docs` builds: they let pages in docs/ link to files beside the code.

A README beside the code, a file in examples/ and the like become part of the site once a page links to them: Markdown as
a page, anything else as a download. The links work on the site as they do in a checkout. Called by MkDocs (`hooks` in
mkdocs.yml). Invariant: a link to a file that does not exist is left alone, and MkDocs reports it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BESIDE = "code"
"""The folder of the site that holds what lies outside of docs/."""
_LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add each file outside of docs/ that a page links to, and those that such a file links to."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen:
                continue
            seen.add(target)
            if not target.is_relative_to(DOCS):
                files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave docs/ into links within the site."""
    source = Path(page.file.abs_src_path)

    def moved(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        link = os.path.relpath(_uri(target), os.path.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _outside_code(markdown, moved)


def _outside_code(markdown: str, change: Any) -> str:
    """Change the links of a page, but for those that stand in code."""
    parts, at = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(change, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(change, markdown[at:])])


def _targets(page: Path) -> list[Path]:
    text = _CODE.sub("", page.read_text())
    found = (_target(page, match[2]) for match in _LINK.finditer(text))
    return [target for target in found if target is not None]


def _target(page: Path, link: str) -> Path | None:
    """The file that a link leads to; None for a link to the page itself, to the web or to nothing."""
    if not link or ":" in link:
        return None
    target = (page.parent / link).resolve()
    if target.is_dir():
        target = target / "README.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _uri(target: Path) -> str:
    """Where a file lies on the site."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{BESIDE}/{target.relative_to(ROOT).as_posix()}"

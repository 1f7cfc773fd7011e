"""The sentences of a Markdown page or a docstring, with their lines. Used by the test that keeps them short."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCED = re.compile(r"^```.*?^```$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_RULE = re.compile(r"[-:| ]+")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
_END = re.compile(r"""(?<=[.!?])["')*_]*\s+(?=["'(*_]*[A-Z0-9`“])|:\s*$""")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Examples?):\s*")
_FIELD = re.compile(r"\s+[\w.*]+: ")
_WORD = re.compile(r"[^\W_][\w'’.,:%/+-]*")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence; `line` is the line in which its paragraph, list item or table row begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """How many words it has. Code in backticks is one word."""
        return len(_WORD.findall(self.text))


def sentences(markdown: str) -> Iterator[Sentence]:
    """Every sentence of the page, in order; what stands in code blocks is none."""
    for line, text in _paragraphs(_FENCED.sub(lambda match: "\n" * match[0].count("\n"), markdown)):
        plain = _CODE.sub("Code", _LINK.sub(r"\1", _CODE.sub("Code", text)))
        yield from (Sentence(line, part.strip()) for part in _END.split(plain) if part and part.strip())


def _paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, heading, list item and table cell."""
    begun, parts = 0, list[str]()
    for number, line in enumerate([*markdown.splitlines(), ""], start=1):
        starts_anew = not line.strip() or line.startswith(("#", "|")) or _ITEM.match(line) is not None
        if starts_anew and parts:
            yield begun, " ".join(parts)
            parts = []
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield from ((number, cell.strip()) for cell in cells if cell and not _RULE.fullmatch(cell))
        elif line.startswith("#"):
            yield number, line.lstrip("# ")
        elif line.strip():
            if not parts:
                begun = number
            parts.append(_ITEM.sub("", line, count=1).strip())


def markdown(docstring: str) -> str:
    """A docstring as a page: each argument and each error is a list item, and code is left out."""
    lines = list[str]()
    section, code = "", False
    for line in inspect.cleandoc(docstring).replace("\b", "").splitlines():
        if match := _SECTION.fullmatch(line):
            section = match[1]
            lines.append("")
            continue
        if line and not line.startswith(" "):
            section = ""
        code = line.startswith("    ") and (code or (not section and not (lines and lines[-1])))
        if code or section.startswith("Example"):
            line = ""
        elif section and _FIELD.match(line):
            line = f"- {line.lstrip()}"
        lines.append(line)
    return "\n".join(lines)

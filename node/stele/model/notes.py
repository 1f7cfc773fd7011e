"""Owner and comment of a table: notes for people, which nothing depends on. Used by master and operator."""

from __future__ import annotations

import unicodedata

OWNER_CHARS_MAX = 128
COMMENT_CHARS_MAX = 1_000


def note_faults(owner: str, comment: str) -> list[str]:
    """What is wrong with an owner and a comment, in words; empty if nothing is."""
    faults = []
    if len(owner) > OWNER_CHARS_MAX or _controls(owner):
        faults.append(
            f"owner of {len(owner)} characters; expected at most {OWNER_CHARS_MAX}, no control characters"
        )
    if len(comment) > COMMENT_CHARS_MAX or _controls(comment.replace("\n", "")):
        faults.append(
            f"comment of {len(comment)} characters; expected at most {COMMENT_CHARS_MAX}, no control characters "
            "but line ends"
        )
    return faults


def _controls(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)

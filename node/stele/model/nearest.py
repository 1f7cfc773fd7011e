"""Finds the known word that somebody meant: the same word in another case, or, for messages, the nearest one. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable

_WORD_CHARS_MAX = 200
"""The longest word compared: difflib takes quadratic time."""
_PREFIX_CHARS_MIN = 5


def in_any_case(word: str, known: Iterable[str]) -> str | None:
    """Return `word` if it is known, else the only known word that differs from it in case alone. None: there is none."""
    there = list(known)
    alike = [each for each in there if each.lower() == word.lower()]
    return word if word in there else alike[0] if len(alike) == 1 else None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that somebody who wrote `word` probably meant; None if none is near. Ignores case."""
    by_lower = {each.lower(): each for each in known}
    said = str(word)[:_WORD_CHARS_MAX].lower()
    found = difflib.get_close_matches(said, by_lower, n=1, cutoff=0.6)
    if found:
        return by_lower[found[0]]
    # Finds "replicationFactor" for "replicas".
    alike = max(by_lower, key=lambda each: _shared_start(each, said), default="")
    return by_lower[alike] if _shared_start(alike, said) >= _PREFIX_CHARS_MIN else None


def _shared_start(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "; did you mean 'nullable'?", or ""."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found is not None else ""

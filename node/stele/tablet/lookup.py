"""Work on an entry that is too long for a turn of an event loop. Used by the store, by what it looks rows up in, and by
whoever applies entries.

Invariant: a lookup changes nothing. So it may run on any thread, while its owner applies no entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class WouldBlock(Exception):
    """A brief look was asked for, and this one would take long. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What has to be found out before an entry can be applied. `run` blocks, and may read files; it does not raise. What it
    gives is for `StateMachine.apply`, once, as long as no other entry was applied meanwhile."""

    run: Callable[[], Any]

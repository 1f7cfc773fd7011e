"""Lookups for an entry that take too long for the event loop. Used by the store and by whoever applies
entries.

Invariant: a lookup changes nothing. So it may run in any thread, as long as its owner applies no entry
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class WouldBlock(Exception):
    """The caller asked for a brief look, but it would take long. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What must be looked up before an entry can be applied. `run` blocks and may read files, but does not
    raise.

    Pass its result to `StateMachine.apply` once, with no other entry applied in between."""

    run: Callable[[], Any]

"""Faults planted in production's code, to prove that the simulator would see them. Used by test_nodesim.py and `--planted`.

Each replaces one attribute of one class or module while a run lasts; its comment says which rule it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from stele.consensus import bootstrap
from stele.consensus.reads import Reads
from stele.consensus.runtime import CoreRuntime
from stele.consensus.timestamps import Timestamps
from stele.raft import effects as fx
from stele.tablet.exactly_once import ExactlyOnce
from stele.wal.clear import Suspects
from stele.wal.segment import ActiveSegment
from tests.wal.simfs import PowerOff

_initial_state, _carry_out, _sync = bootstrap.initial_state, CoreRuntime._carry_out, ActiveSegment.sync


@dataclass(frozen=True)
class Bug:
    """`owner.name` becomes `instead`. `told`: what a failure says; `first`: a seed from which it is soon found."""

    label: str
    owner: Any
    name: str
    instead: Callable[..., Any]
    told: str
    first: int = 1

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While this lasts, production's code has the fault."""
        with mock.patch.object(self.owner, self.name, self.instead):
            yield


def _without(**fields: Any) -> Callable[..., Any]:
    def start(*arguments: Any, **options: Any) -> Any:
        return replace(_initial_state(*arguments, **options), **fields)

    return start


def _sends_at_once(runtime: CoreRuntime, effects: list[fx.Effect]) -> None:
    _carry_out(runtime, [fx.Send(e.to, e.message) if type(e) is fx.Send else e for e in effects])


def _syncs_nothing(active: ActiveSegment) -> None:
    active.was_synced()


def _ignores_errors(active: ActiveSegment) -> None:
    try:
        _sync(active)
    except PowerOff:
        raise
    except OSError:
        active.was_synced()


async def _at_once(reads: Reads, within_ms: int = 0) -> None:
    return None


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


BUGS = (
    # A start takes no vote from the disk (Raft figure 2: votedFor is persistent).
    Bug(
        "a vote forgotten at a start", bootstrap, "initial_state", _without(voted_for=None), "starts at term"
    ),
    # A start takes no term from the disk (Raft figure 2: currentTerm is persistent).
    Bug(
        "a term forgotten at a start",
        bootstrap,
        "initial_state",
        _without(term=0, voted_for=None),
        "starts at term",
    ),
    # Whoever leads next begins above no ceiling of the log (docs: timestamps).
    Bug("a ceiling forgotten", Timestamps, "in_log", _nothing, "timestamp|snapshot", 231),
    # The runtime sends what a Persist holds back (duty 2 of stele.raft.effects).
    Bug("a message before its Persist", CoreRuntime, "_carry_out", _sends_at_once, "on disk"),
    # The log calls a batch synced that is in the page cache alone.
    Bug("a sync that is none", ActiveSegment, "sync", _syncs_nothing, "begins with term|damaged|lost"),
    # The log goes on after a sync that failed (the log's README: a failed sync is final).
    Bug(
        "a failed sync that is ignored",
        ActiveSegment,
        "sync",
        _ignores_errors,
        "begins with term|damaged",
        439,
    ),
    # Damage is cut as if it were a torn tail ("Damage that is skipped in silence" must never happen).
    Bug("rot that nobody is told of", Suspects, "judge", lambda self, damages: {}, "begins with term"),
    # A read is served at once, without a word from a majority (Raft §8).
    Bug("a read without asking", Reads, "linearizable_read", _at_once, "not linearizable", 10),
    # A retry is done once more (ExactlyOnce).
    Bug("a retry done again", ExactlyOnce, "earlier", _nothing, "again|linearizable", 2),
)

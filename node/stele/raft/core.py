"""The state machine of one replica: events in, effects out. Entry point of the package; its parts are its neighbours.

core = RaftCore(options, self_replica, initial, rng)
effects = core.step(Start(now_ms)) ; core.step_many(events) coalesces a whole turn of the owner's loop into one
Persist and one UpdateRequest per peer ; core.next_deadline_ms says when the next Tick is due.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.model.ids import ReplicaId
from stele.raft.effects import Effect
from stele.raft.events import Event, InitialState
from stele.raft.options import RaftOptions
from stele.raft.ports import Chance
from stele.raft.status import RaftStatus


class RaftCore:
    """One replica of one group."""

    def __init__(
        self, options: RaftOptions, self_replica: ReplicaId, initial: InitialState, rng: Chance
    ) -> None:
        self.options = options
        self.self_replica = self_replica
        self.initial = initial
        self.rng = rng

    def step(self, event: Event) -> list[Effect]:
        """Take one event; what to do about it."""
        return self.step_many((event,))

    def step_many(self, events: Iterable[Event]) -> list[Effect]:
        """Take several events as one turn: one Persist (as a rule) and one message per peer for all of them."""
        raise NotImplementedError

    @property
    def next_deadline_ms(self) -> int:
        """When the next Tick is due at the latest, on the owner's clock."""
        raise NotImplementedError

    def status(self) -> RaftStatus:
        """A frozen view."""
        raise NotImplementedError

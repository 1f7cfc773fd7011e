"""Drivers as masters know them: they claim, and begin and end intents. See masters.py.

A driver believes in its epoch until it is told otherwise, as one does that stands still for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from stele.model.errors import Code, SteleError
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb

if TYPE_CHECKING:
    from tests.sim.masters import Masters

_TTL_MS = 400


class Given(NamedTuple):
    """A claim that a driver was told of. Times of the world, in milliseconds."""

    epoch: int
    holder: str
    begun: float
    ended: float


class Driver:
    """Claims, and begins and ends intents under its claim. It believes in its epoch until it is told otherwise."""

    def __init__(self, masters: Masters, holder: str) -> None:
        self._masters = masters
        self._holder = holder
        self._epoch = 0
        self._busy = False

    def act(self) -> None:
        """Do the next thing, unless the last one is under way."""
        if self._busy:
            return
        rng = self._masters.world.rng
        if not self._epoch or rng.random() < 0.1:
            self._claim(0)
        elif rng.random() < 0.2:
            self._claim(self._epoch)
        else:
            self._call("GetClusterView", pb.GetClusterViewRequest(), self._viewed)

    def _call(self, method: str, request: Any, then: Callable[[Any, SteleError | None, float], None]) -> None:
        self._busy = True
        begun = self._masters.world.now

        def answered(answer: Any, error: SteleError | None) -> None:
            self._busy = False
            then(answer, error, begun)

        self._masters.call(method, request, answered)

    def _claim(self, epoch: int) -> None:
        def then(answer: Any, error: SteleError | None, begun: float) -> None:
            world = self._masters.world
            if error is None:
                self._epoch = answer.claim.epoch
                given = Given(self._epoch, self._holder, begun, world.now)
                world.judge(self._masters.claimed, given)
            elif error.code is Code.STALE_EPOCH:
                self._epoch = 0

        request = pb.ClaimDriverRequest(holder=self._holder, ttl_ms=_TTL_MS, epoch=epoch)
        self._call("ClaimDriver", request, then)

    def _viewed(self, view: Any, error: SteleError | None, begun: float) -> None:
        rng = self._masters.world.rng
        running = (
            [] if error is not None else [t for t in view.tablets if t.state == "RUNNING" and t.table_name]
        )
        if not running:
            return
        tablet = rng.choice(running)
        intents = [i for i in view.intents if i.tablet_id == tablet.tablet_id]
        if not intents:
            self._begin(tablet)
        elif rng.random() < 0.3:
            self._take_over(intents[0])
        else:
            self._end(tablet, intents[0])

    def _begin(self, tablet: Any) -> None:
        held = {p.node_id for p in tablet.committed_config.peers}
        free = [s for s in self._masters.servers if id_to_pb(s) not in held]
        if not free:
            return
        target = self._masters.world.rng.choice(free)
        intent = pb.IntentPB(tablet_id=tablet.tablet_id, target_node=id_to_pb(target), kind="add")
        epoch = self._epoch

        def then(answer: Any, error: SteleError | None, begun: float) -> None:
            self._told(error)
            if error is None:
                self._masters.world.judge(self._masters.ordered, epoch, begun, "an intent")
                key = id_from_pb(answer.intent.tablet_id), answer.intent.replica_id
                self._masters.world.judge(self._masters.new_id, key)

        self._call("BeginIntent", pb.BeginIntentRequest(epoch=epoch, intent=intent), then)

    def _take_over(self, intent: Any) -> None:
        epoch = self._epoch

        def then(answer: Any, error: SteleError | None, begun: float) -> None:
            self._told(error)
            if error is None:
                self._masters.world.judge(self._masters.ordered, epoch, begun, "a taken intent")

        self._call("BeginIntent", pb.BeginIntentRequest(epoch=epoch, intent=intent), then)

    def _end(self, tablet: Any, intent: Any) -> None:
        """End it: with a configuration that has the new replica in the place of another, or with one that never will."""
        config = common_pb2.ConfigurationPB()
        config.CopyFrom(tablet.committed_config)
        rng = self._masters.world.rng
        if rng.random() < 0.5:
            gone = rng.choice(list(config.peers))
            gone.node_id, gone.replica_id = intent.target_node, intent.replica_id
        config.opid_index = max(config.opid_index, intent.config_index, 0) + 1
        epoch = self._epoch

        def then(answer: Any, error: SteleError | None, begun: float) -> None:
            self._told(error)
            if error is None:
                self._masters.world.judge(self._masters.ordered, epoch, begun, "the end of an intent")

        request = pb.EndIntentRequest(
            epoch=epoch,
            tablet_id=tablet.tablet_id,
            replica_id=intent.replica_id,
            committed_config=config,
            term=1,
        )
        self._call("EndIntent", request, then)

    def _told(self, error: SteleError | None) -> None:
        if error is not None and error.code is Code.STALE_EPOCH:
            self._epoch = 0

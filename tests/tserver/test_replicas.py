"""Which replica of a tablet is meant: the index by tablet against a look at all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState, Superblock
from stele.model.ids import ReplicaId, StreamKey, TableId, TabletId
from stele.tserver.replicas import Replicas
from tests.consensus.cluster import Network, TestNode

TABLETS = [TabletId(f"{n:032x}") for n in range(3)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "fail"]), st.sampled_from(TABLETS), st.integers(1, 3))
)


def dumb(here: Replicas, tablet_id: str) -> Replica | None:
    """The highest replica_id, FAILED ones last."""
    found = [r for r in here if r.tablet_id == tablet_id]
    return max(found, key=lambda r: (r.state is not ReplicaState.FAILED, r.replica_id), default=None)


async def play(steps: list[tuple[str, TabletId, int]], host: TestNode) -> None:
    here = Replicas()
    for what, tablet_id, number in steps:
        key = StreamKey(tablet_id, ReplicaId(number))
        there = here.by_key(key)
        if what == "drop":
            here.gone(key, None)
        elif what == "fail" and there is not None:
            there.fail("damage")
        elif there is None:
            superblock = Superblock(tablet_id, key.replica_id, TableId(""), "", "table", DataState.READY)
            here.add(Replica(superblock, host.directory, host))
        for tablet in TABLETS:
            assert here.current(tablet) is dumb(here, tablet)
            assert here.holds(tablet) == (dumb(here, tablet) is not None)
            if here.holds(tablet):
                assert here.of_request(bytes.fromhex(tablet)) is dumb(here, tablet)


@given(steps=STEPS)
@settings(deadline=None)
def test_the_current_replica_is_what_a_look_at_all_says(steps: list[tuple[str, TabletId, int]]) -> None:
    async def run() -> None:
        await play(steps, TestNode(Network(), Path()))

    asyncio.run(run())

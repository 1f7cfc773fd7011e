"""Which format of column files a replica writes: by what its node has heard of the cluster version, at each flush and merge."""

from __future__ import annotations

from typing import cast

from stele.consensus.replica import Replica
from stele.tablet.compaction import run_job
from stele.tablet.store import TabletStore
from tests.consensus.cluster import rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import installed, young_member

NOT_HEARD, FIRST, SECOND = 0, 1, 2


def formats(replica: Replica) -> list[int]:
    """The formats of a replica's files, newest first."""
    store = cast(TabletStore, replica.machine)
    return [(store.directory / name).read_bytes()[8] for name in store.files]


async def test_files_turn_to_format_2_once_the_node_hears_that_it_is_finalized(group_of: MakeGroup) -> None:
    group, (node,) = await group_of(1)
    replica = await group.leader()
    wanted: list[int] = []
    for at, told in enumerate((NOT_HEARD, FIRST, SECOND)):
        node.told_version = told
        await group.write(rows(range(100 * at, 100 * at + 100)))
        await replica.storage.flush()
        wanted.insert(0, 2 if told == SECOND else 1)
        assert formats(replica) == wanted
    store = cast(TabletStore, replica.machine)
    await group.write(rows([500]))
    await replica.storage.flush()
    job = store.plan_compaction(full=True)
    assert job is not None
    store.install_compaction(run_job(job))
    assert formats(replica) == [2]


async def test_a_witness_whose_rows_arrive_writes_what_its_own_node_may(group_of: MakeGroup) -> None:
    """Its node has heard it, the source not yet. The files of either are read by both."""
    group, nodes = await group_of(3, spare=1)
    for node in nodes[:3]:
        node.told_version = FIRST
    await group.write(rows(range(100)))
    source, copy, _ = await young_member(group, await group.leader(), nodes[3])
    assert source.hold is not None
    source.hold.set()
    await installed(copy)
    new = nodes[3].replicas.get(group.tablet_id)
    await wait_until(lambda: new.machine is not None)
    assert formats(new) == [1]
    await group.write(rows(range(100, 200)))
    await group.caught_up(new)
    await new.storage.flush()
    assert formats(new) == [2, 1]

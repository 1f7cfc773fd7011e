"""A master that is formed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.ids import CATALOG_TABLET_ID
from stele.tserver.node import Node
from tests.consensus.cluster import wait_until
from tests.tserver.local import LocalCluster


@pytest.mark.parametrize("when", ["asked", "formed", "starting"])
async def test_a_formation_whose_caller_goes_away_is_carried_out(tmp_path: Path, when: str) -> None:
    """The master was formed on paper, and its catalog was never started: asked again it said that all was done."""
    made = LocalCluster(tmp_path, nodes=0)
    node = await made.launch("master", first=True)
    try:
        await wait_until(lambda: node.replicas.holds(CATALOG_TABLET_ID))
        record = node.volume.record
        masters = [(record.node_id, record.format_id)]
        reached = {
            "asked": lambda: True,
            "formed": lambda: node.description.formed,
            "starting": lambda: node.replicas.current(CATALOG_TABLET_ID) is not None,
        }[when]
        asking = asyncio.create_task(node.formation.confirm(masters))
        await asyncio.sleep(0)
        while not reached():
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await node.formation.confirm(masters)
        await wait_until(lambda: runs(node))
        assert node.description.formed and not node.replicas.held
    finally:
        await made.close()


def runs(node: Node) -> bool:
    catalog = node.replicas.current(CATALOG_TABLET_ID)
    return catalog is not None and catalog.state is ReplicaState.RUNNING

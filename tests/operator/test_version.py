"""spec.version finalizes an upgrade, once all members read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.versions import versions_of
from stele.model.cluster_version import CLUSTER_VERSION, RELEASES
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import make_plan
from stele_operator.plan.actions import FinalizeVersion
from stele_operator.plan.findings import Kind
from tests.operator.world import World
from tests.operator.worlds import made


def finalizing(world: World) -> list[int]:
    """The versions that the next pass would finalize."""
    return [a.version for a in make_plan(world.observe()).actions if isinstance(a, FinalizeVersion)]


def test_it_is_finalized_once_all_members_read_it() -> None:
    world = made()
    world.cluster["spec"]["version"] = "0.2"
    world.run()
    assert world.finalized == 1  # some member reads 1 alone
    o = world.observe()
    assert o.catalog is not None
    o = replace(o, catalog=replace(o.catalog, lagging={"node flights-node-1": 1, "node flights-node-2": 2}))
    (waits,) = (f for f in make_plan(o).findings if f.reason == "VersionWaits")
    assert waits.kind is Kind.RECONCILING and "waits for node flights-node-1:" in waits.message
    world.readable = 2
    assert finalizing(world) == [2]
    world.run()
    assert world.finalized == 2 and finalizing(world) == []
    assert not any(f.reason == "VersionWaits" for f in make_plan(world.observe()).findings)


@pytest.mark.parametrize("version", [None, "0.1"])
def test_without_it_or_with_a_lower_one_nothing_is_finalized(version: str | None) -> None:
    world = made()
    world.readable = 2
    if version is not None:
        world.cluster["spec"]["version"] = version
    world.run()
    assert world.finalized == 1 and finalizing(world) == []


def test_a_paused_cluster_and_unknown_masters_finalize_nothing() -> None:
    world = made()
    world.readable = 2
    world.cluster["spec"]["version"] = "0.2"
    o = replace(world.observe(), catalog=None)
    assert not any(isinstance(a, FinalizeVersion) for a in make_plan(o).actions)
    world.cluster["spec"]["paused"] = True
    world.run()
    assert world.finalized == 1


def test_the_field_takes_each_release_that_has_a_version() -> None:
    assert max(RELEASES.values()) == CLUSTER_VERSION == list(RELEASES.values())[-1]
    for release in RELEASES:
        assert TabletClusterSpec(version=release).version == release  # type: ignore[arg-type]


def test_what_members_read_is_in_the_view() -> None:
    """One that says nothing is of release 0.1; those that are retired, or never started, do not count."""

    def node(number: int, version: int, **more: object) -> pb.NodeViewPB:
        registration = pb.NodeRegistrationPB(role="node", cluster_version=version)
        fields = {"formed": True, "state": pb.ACTIVE, **more}
        return pb.NodeViewPB(node_id=id_to_pb(f"{number:032x}"), registration=registration, **fields)  # type: ignore[arg-type]

    new = [node(1, 2), node(2, 2), node(3, 0, state=pb.RETIRED), node(4, 0, formed=False)]
    assert versions_of(pb.GetClusterViewResponse(nodes=new)).possible == 2
    found = versions_of(pb.GetClusterViewResponse(nodes=[*new, node(5, 0)], cluster_version=0))
    assert (found.finalized, found.possible) == (1, 1)
    assert [m.node_id for m in found.lagging] == [f"{5:032x}"]

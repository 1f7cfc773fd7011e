"""Addresses of pods, of either family: what a pod is told, and where its masters are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc.resolve import split_address
from stele.tserver.options import NodeOptions
from stele_operator.observe import observe_masters
from tests.operator.worlds import made, node_of

BOTH = pytest.mark.parametrize("ip", ["10.0.0.5", "fd00::5"])


@BOTH
def test_a_pod_is_told_its_address_as_a_node_reads_it(ip: str) -> None:
    world = made()
    (container,) = world.objects["Pod", node_of(world, "n2", "master")]["spec"]["containers"]
    arguments = [word.replace("$(POD_IP)", ip) for word in container["args"]]
    told = {flag: arguments[arguments.index(flag) + 1] for flag in ("--listen", "--advertise")}
    assert {split_address(address) for address in told.values()} == {(ip, 7051)}
    options = NodeOptions(
        data_dir=Path("/data"),
        node_id=NodeId(new_id()),
        cluster_id=ClusterId(new_id()),
        listen=told["--listen"],
        advertise=told["--advertise"],
    )
    assert options.advertised == ("10.0.0.5:7051" if ip == "10.0.0.5" else "[fd00::5]:7051")


class Link:
    """The masters' port: where they were looked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def learn(self, addresses: Sequence[str]) -> None:
        self.asked += addresses

    async def reports(self, pods: Mapping[Any, str]) -> tuple[()]:
        self.asked += pods.values()
        return ()


@BOTH
async def test_masters_are_asked_where_they_are(ip: str) -> None:
    seen, link = made().observe(), Link()
    pods = tuple(replace(p, ip=ip, running=True) for p in seen.pods if p.role == "master")[:1]
    await observe_masters(link, replace(seen, pods=pods, identity=None))  # type: ignore[arg-type]
    assert [split_address(address) for address in link.asked] == [(ip, 7051)] * 2

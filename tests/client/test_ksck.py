"""What `stele ksck` says of a cluster that hibernates or wakes: that, and no fault."""

from __future__ import annotations

import json

import pytest

from stele.cli import ksck
from stele.client.health import examine
from stele.rpc.proto import master_pb2

HELD = "TabletCluster data/flights hibernates, or wakes and waits for its members"


def view(*, held: str, silent: bool) -> master_pb2.GetClusterViewResponse:
    """One tablet on one node, as the leading master tells it."""
    found = master_pb2.GetClusterViewResponse(cluster_id=b"c" * 16, leader=b"n" * 16, settled=True)
    found.policy.held = held
    node = found.nodes.add(node_id=b"n" * 16, name="flights-node-0", formed=True, ever_heard=True)
    node.heartbeat_age_ms = 60_000 if silent else 0
    found.tablets.add(tablet_id=b"t" * 16, table_id=b"T" * 16, table_name="people", state="RUNNING")
    return found


def test_a_cluster_that_hibernates_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert ksck.show(examine(view(held=HELD, silent=True))) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(f"HIBERNATES: {HELD}; this is not a fault")
    assert "NOT HEALTHY" not in said and "is silent:" not in said and "is unavailable" not in said
    assert ksck.show(examine(view(held=HELD, silent=True)), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["held"] == HELD


def test_one_that_is_awake_is_judged_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    assert ksck.show(examine(view(held="", silent=True))) == 1
    said = capsys.readouterr().out
    assert said.endswith("NOT HEALTHY\n") and "is silent:" in said and "people is unavailable" in said

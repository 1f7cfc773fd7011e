"""What `stele ksck` says of a cluster that is not as it should be: which member, by its name, and since when."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from stele.cli.ksck import show
from stele.client.health import examine
from stele.rpc.proto import common_pb2, master_pb2

NODES = [bytes([n]) * 16 for n in range(1, 5)]
View = master_pb2.GetClusterViewResponse


def view() -> View:
    """One master, three nodes and a tablet on them; all is well."""
    found = View(leader=NODES[0], cluster_id=b"c" * 16, settled=True)
    for number, node_id in enumerate(NODES):
        found.nodes.add(
            node_id=node_id,
            name=f"flights-{'node' if number else 'master'}-{number}",
            registration=master_pb2.NodeRegistrationPB(
                address=f"10.0.0.{number}:7050", role="node" if number else "master", machine=f"m{number}"
            ),
            state=master_pb2.ACTIVE,
            heartbeat_age_ms=400,
            ever_heard=True,
            formed=True,
        )
    tablet = found.tablets.add(
        tablet_id=b"t" * 16,
        table_name="flights",
        state="RUNNING",
        leader_node=NODES[1],
        replication_factor=3,
    )
    for replica, node_id in enumerate(NODES[1:], 1):
        tablet.committed_config.peers.add(node_id=node_id, replica_id=replica, member_type=common_pb2.VOTER)
        tablet.replicas.add(
            node_id=node_id,
            status=common_pb2.ReplicaStatusPB(replica_id=replica, state=common_pb2.RUNNING),
        )
    return found


def lost(found: View) -> None:
    found.nodes[3].heartbeat_age_ms = 60_000


def never_started(found: View) -> None:
    """As a pod's node that no machine takes."""
    found.nodes.add(
        node_id=b"\x09" * 16, name="flights-node-9", state=master_pb2.ACTIVE, heartbeat_age_ms=60_000
    )


def just_asked_for(found: View) -> None:
    never_started(found)
    found.nodes[4].heartbeat_age_ms = 100


def new_leader(found: View) -> None:
    never_started(found)
    found.nodes[4].formed = True


def retired(found: View) -> None:
    never_started(found)
    found.nodes[4].state = master_pb2.RETIRED


def failed(found: View) -> None:
    found.tablets[0].replicas[2].status.state = common_pb2.FAILED
    found.tablets[0].replicas[2].status.error = "CORRUPT: MANIFEST"


def gone(found: View) -> None:
    """As the masters tell of a member that its node has reported not to have."""
    status = common_pb2.ReplicaStatusPB(replica_id=3, error="its node reports no such replica")
    found.tablets[0].replicas[2].status.CopyFrom(status)


def far_behind(found: View) -> None:
    """Its node answers, and it acknowledges nothing; only the leader knows."""
    found.tablets[0].replicas[0].status.peers.add(replica_id=2)
    found.tablets[0].replicas[0].status.peers.add(replica_id=3, needs_copy=True)


def out_of_reach(found: View) -> None:
    """Its node answers the masters, and none of its peers; only the leader knows, which told it once."""
    leader = found.tablets[0].replicas[0]
    leader.age_ms = 50_000
    leader.status.peers.add(replica_id=2, last_heard_ms=40)
    leader.status.peers.add(replica_id=3, last_heard_ms=5_040, unreached=True)


def fenced(found: View) -> None:
    """Its leader does not reach it, because somebody wants that."""
    out_of_reach(found)
    next(n for n in found.nodes if n.name == "flights-node-3").wanted = master_pb2.WANTED_FENCED


def without_a_leader(found: View) -> None:
    """It says nothing new, as it hears nothing."""
    found.tablets[0].replicas[2].status.state = common_pb2.CONFIGURING
    found.tablets[0].replicas[2].age_ms = 41_000


def neither_reached_nor_led(found: View) -> None:
    """The leader's word tells more."""
    out_of_reach(found)
    without_a_leader(found)


def just_started(found: View) -> None:
    without_a_leader(found)
    found.tablets[0].replicas[2].age_ms = 9_000


def nearly_full(found: View) -> None:
    """Its leaders have gone elsewhere, so every tablet looks well."""
    for node in found.nodes:
        node.disk_free_bytes, node.disk_used_bytes = 5 << 30, 5 << 30
    found.nodes[3].disk_free_bytes, found.nodes[3].disk_low = 201 << 20, True


def nearly_full_master(found: View) -> None:
    found.nodes[0].disk_low = True


def nearly_full_and_silent(found: View) -> None:
    """Another node is silent, on which no tablet is."""
    nearly_full(found)
    new_leader(found)


def nearly_full_and_lost(found: View) -> None:
    """What it said last is not told as if it were so now."""
    nearly_full(found)
    lost(found)


def wrong_clocks(found: View) -> None:
    """Their leaders have gone elsewhere; one that is off by less than nodes mind, and one that says nothing."""
    found.nodes[0].wall_ahead_us = -3_600_000_000
    found.nodes[1].wall_ahead_us = 1_999_000
    found.nodes[3].wall_ahead_us = 2_100_000


def of_a_newer_version(found: View) -> None:
    found.tablets[0].replicas[2].status.state = 99  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "code", "last", "words"),
    [
        (
            gone,
            1,
            "NOT HEALTHY",
            "replica 3 on flights-node-3 (10.0.0.3:7050) is gone: its node reports no such",
        ),
        (
            far_behind,
            1,
            "NOT HEALTHY",
            "replica 3 on flights-node-3 (10.0.0.3:7050) lacks entries that its leader's log no longer has",
        ),
        (
            out_of_reach,
            1,
            "NOT HEALTHY",
            "replica 3 on flights-node-3 (10.0.0.3:7050) cannot be reached by its leader: no answer for 55 s",
        ),
        (
            fenced,
            1,
            "NOT HEALTHY",
            "replica 3 on flights-node-3 (10.0.0.3:7050) serves nobody, because its node is fenced",
        ),
        (
            neither_reached_nor_led,
            1,
            "NOT HEALTHY",
            "cannot be reached by its leader: no answer for 55 s",
        ),
        (
            without_a_leader,
            1,
            "NOT HEALTHY",
            "replica 3 on flights-node-3 (10.0.0.3:7050) has found no leader for 41 s",
        ),
        (just_started, 0, "OK", ""),
        (of_a_newer_version, 1, "NOT HEALTHY", "replica 3 on flights-node-3 (10.0.0.3:7050) is 99"),
        (lambda found: None, 0, "OK", "flights-node-1"),
        (retired, 0, "OK", ""),
        (lost, 1, "NOT HEALTHY", "replica 3 on flights-node-3 (10.0.0.3:7050) is on a silent node"),
        (lost, 1, "NOT HEALTHY", "node flights-node-3 (10.0.0.3:7050) is silent: 60.0 s ago"),
        (failed, 1, "NOT HEALTHY", "replica 3 on flights-node-3 (10.0.0.3:7050) FAILED: CORRUPT: MANIFEST"),
        (never_started, 0, "OK", "node flights-node-9 is registered but has never started"),
        (never_started, 0, "OK", "kubectl describe pod flights-node-9"),
        (just_asked_for, 0, "OK", "flights-node-9 is registered but has never started"),
        (new_leader, 1, "WARNING: 1 of 5 nodes and masters silent, all tablets healthy", "not for 60 s"),
        (
            nearly_full,
            1,
            "WARNING: 1 of 4 nodes and masters low on disk, all tablets healthy",
            "node flights-node-3 (10.0.0.3:7050) refuses writes because its disk is nearly full, 201 MiB are free: the "
            "tablets that it leads refuse writes (DISK_FULL)",
        ),
        (nearly_full, 1, "WARNING: 1 of 4 nodes and masters low on disk, all tablets healthy", " 5.0 GiB "),
        (
            nearly_full_master,
            1,
            "WARNING: 1 of 4 nodes and masters low on disk, all tablets healthy",
            "master flights-master-0 (10.0.0.0:7050) refuses writes because its disk is nearly full: while it leads, no table",
        ),
        (
            nearly_full_and_silent,
            1,
            "WARNING: 1 of 5 nodes and masters silent, 1 of 5 nodes and masters low on disk, all tablets healthy",
            "node flights-node-9 is silent",
        ),
        (
            wrong_clocks,
            1,
            "WARNING: 2 of 4 nodes and masters with a wrong clock, all tablets healthy",
            "master flights-master-0 (10.0.0.0:7050): its clock is 3600.0 s behind what most clocks of the cluster say",
        ),
        (
            wrong_clocks,
            1,
            "WARNING: 2 of 4 nodes and masters with a wrong clock, all tablets healthy",
            "node flights-node-3 (10.0.0.3:7050): its clock is 2.1 s ahead of what most",
        ),
        (nearly_full_and_lost, 1, "NOT HEALTHY", "node flights-node-3 (10.0.0.3:7050) is silent: 60.0 s ago"),
    ],
)
def test_ksck_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], change: Callable[[View], None], code: int, last: str, words: str
) -> None:
    found = view()
    change(found)
    assert show(examine(found)) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == last, out
    assert words in out
    assert "zone" not in out  # nobody gave zones
    assert show(examine(found), as_json=True) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["healthy"], bool(told["silent"])) == (last[:3] != "NOT", " is silent" in out)
    assert bool(told["low_on_disk"]) == (" refuses writes" in out)
    assert len(told["wrong_clocks"]) == out.count(": its clock is ")


def test_the_catalog_is_counted_by_name_as_kubectl_does_not_count_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = view()
    assert show(examine(found)) == 0
    assert "1 tablet: 1 healthy" in capsys.readouterr().out.splitlines()
    catalog = found.tablets.add()
    catalog.CopyFrom(found.tablets[0])
    catalog.tablet_id = bytes(16)
    another = found.tablets.add()
    another.CopyFrom(found.tablets[0])
    another.tablet_id = b"u" * 16
    assert show(examine(found)) == 0
    assert "2 tablets and the catalog: 3 healthy" in capsys.readouterr().out.splitlines()


def test_what_is_under_way_names_nodes_as_kubectl_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = view()
    reason = (
        "replica 3 on node 04040404: its node is silent; new replica on node 03030303; not on node 0badcafe"
    )
    found.intents.add(tablet_id=b"t" * 16, replica_id=4, target_node=NODES[2], kind="replace", reason=reason)
    show(examine(found))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("under way: "))
    assert line.endswith(
        ", replica 4 on flights-node-2 (10.0.0.2:7050): replica 3 on flights-node-3: its node is silent; "
        "new replica on flights-node-2; not on node 0badcafe"
    )
    found.nodes[2].name = ""  # no operator
    show(examine(found))
    assert "; new replica on node 03030303;" in capsys.readouterr().out


def test_who_holds_the_change_budget_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = view()
    found.policy.holding.add(holder="upgrade", away=[master_pb2.AwayPB(node_id=NODES[2], incarnation=3)])
    found.policy.holding.add(holder="heal/flights-node-3")
    found.policy.waiting.append("park/flights-node-1")
    assert show(examine(found)) == 0
    assert (
        "change budget: held by upgrade (flights-node-2 (10.0.0.2:7050) is away), heal/flights-node-3; "
        "park/flights-node-1 must wait"
    ) in capsys.readouterr().out.splitlines()

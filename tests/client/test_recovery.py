"""What a recovery of a tablet would do, judged from a view and what nodes answer."""

from __future__ import annotations

from typing import Any

from stele.client.recovery import Answers, judge
from stele.model.clock import from_physical_us
from stele.model.incarnation import raised
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb

TABLET = "2f" * 16
NODES = [f"{i:032x}" for i in range(1, 6)]
NOON_US = 1_790_000_000_000_000


def status(number: int, index: int = 100, **other: Any) -> common_pb2.ReplicaStatusPB:
    fields: dict[str, Any] = {
        "tablet_id": id_to_pb(TABLET),
        "replica_id": number,
        "state": common_pb2.CONFIGURING,
        "data_state": common_pb2.READY,
        "has_data": True,
        "term": 4,
        "last_logged": common_pb2.OpIdPB(term=4, index=index),
        "last_committed": common_pb2.OpIdPB(term=4, index=index - 2),
        "last_timestamp": from_physical_us(NOON_US - 3_000_000),
    }
    return common_pb2.ReplicaStatusPB(**(fields | other))


def view(silent: tuple[int, ...], *, voters: int = 3, **of_tablet: Any) -> pb.GetClusterViewResponse:
    """`silent`: numbers of nodes that the masters do not hear."""
    peers = [
        common_pb2.PeerPB(node_id=id_to_pb(NODES[i]), replica_id=i + 1, member_type=common_pb2.VOTER)
        for i in range(voters)
    ]
    tablet: dict[str, Any] = {
        "tablet_id": id_to_pb(TABLET),
        "table_name": "t",
        "state": "RUNNING",
        "committed_config": common_pb2.ConfigurationPB(opid_index=7, peers=peers),
        "term": 3,
        "replication_factor": voters,
    }
    return pb.GetClusterViewResponse(
        nodes=[
            pb.NodeViewPB(
                node_id=id_to_pb(node_id),
                name=f"n{i}",
                ever_heard=True,
                heartbeat_age_ms=60_000 if i in silent else 100,
                registration=pb.NodeRegistrationPB(address=f"10.0.0.{i}:7050", role="node"),
            )
            for i, node_id in enumerate(NODES, 1)
        ],
        tablets=[pb.TabletViewPB(**(tablet | of_tablet))],
        settled=True,
        now_us=NOON_US,
    )


def judged(silent: tuple[int, ...], answers: Answers, **how: Any) -> Any:
    seen = view(silent, **how)
    told: Answers = {n: answers.get(n, None if i in silent else []) for i, n in enumerate(NODES, 1)}
    return judge(seen.tablets[0], seen, told)


def test_the_most_advanced_survivor_is_taken_and_it_is_told_what_may_be_lost() -> None:
    found = judged((1, 2, 3), {NODES[3]: [status(4, 100)], NODES[4]: [status(5, 104, term=6)]}, voters=5)
    assert not found.refused and [s.replica_id for s in found.survivors] == [5, 4]
    assert [m.lost for m in found.voters] == [True, True, True, False, False]
    assert found.term == 6 and found.incarnation == 0
    assert "its node is silent for 60 s" in found.voters[0].state
    assert "had acknowledged, after 2026-09-21 14:13:17 UTC, the newest write of replica 5" in found.may_lose
    assert "n1 at 2026-09-21 14:12:20 UTC" in found.may_lose


def test_a_survivor_without_a_write_tells_no_time() -> None:
    found = judged((1, 2, 3), {NODES[3]: [status(4, last_timestamp=0)]}, voters=5)
    assert "had acknowledged; replica 4 does not say when its newest write was; last heard" in found.may_lose


def test_a_term_weighs_more_than_an_index_and_an_incarnation_more_than_both() -> None:
    later_term = status(5, 50, last_logged=common_pb2.OpIdPB(term=5, index=50))
    found = judged((1, 2, 3), {NODES[3]: [status(4, 100)], NODES[4]: [later_term]}, voters=5)
    assert found.survivors[0].replica_id == 5
    recovered = status(4, 20, tablet_incarnation=raised(0))
    found = judged((1, 2, 3), {NODES[3]: [recovered], NODES[4]: [later_term]}, voters=5)
    assert found.survivors[0].replica_id == 4


def test_it_is_refused_where_a_majority_answers() -> None:
    found = judged((1,), {NODES[1]: [status(2)], NODES[2]: [status(3)]})
    assert "2 of 3 voters answer, which is a majority: nothing is lost" in found.refused
    # The masters do not hear two of them, but this program does.
    found = judged((1, 2), {NODES[1]: [status(2)], NODES[2]: [status(3)]})
    assert "2 of 3 voters answer" in found.refused
    # The masters hear one that does not answer this program.
    found = judged((1,), {NODES[1]: None, NODES[2]: [status(3)]})  # type: ignore[dict-item]
    assert "2 of 3 voters answer" in found.refused
    opening = status(2, state=common_pb2.BOOTSTRAPPING)
    found = judged((1,), {NODES[1]: [opening], NODES[2]: [status(3)]})
    assert "2 of 3 voters answer" in found.refused, "it may answer in a moment"
    # A configuration under way has a majority.
    small = common_pb2.ConfigurationPB(
        opid_index=9,
        peers=[common_pb2.PeerPB(node_id=id_to_pb(NODES[2]), replica_id=3, member_type=common_pb2.VOTER)],
    )
    found = judged((1, 2), {NODES[2]: [status(3, pending_config=small)]})
    assert "1 of 1 voters answer" in found.refused


def test_what_has_no_rows_of_its_own_is_no_survivor() -> None:
    for other in (
        {"state": common_pb2.FAILED, "error": "damaged"},
        {"data_state": common_pb2.TOMBSTONED, "state": common_pb2.STOPPED},
        {"has_data": False},
    ):
        found = judged((1, 2), {NODES[2]: [status(3, **other)]})
        assert "no replica with rows answers" in found.refused and not found.survivors
    assert "does not have it" in judged((1, 2), {}).voters[2].state


def test_a_second_recovery_counts_no_replica_that_the_first_gave_up() -> None:
    config = view(()).tablets[0].committed_config
    config.incarnation = 1
    del config.peers[1:]
    found = judged((1,), {NODES[1]: [status(2)], NODES[2]: [status(3)]}, committed_config=config)
    assert not found.refused and found.incarnation == 1 and found.survivors[0].replica_id == 2


def test_a_history_that_the_tablet_does_not_have_is_the_last_choice() -> None:
    """Two were recovered by hand, without knowing of each other. The masters know one of the two."""
    known, other = raised(0, 7), raised(0, 9)
    config = view(()).tablets[0].committed_config
    config.incarnation = known
    told = {
        NODES[1]: [status(2, 100, tablet_incarnation=known)],
        NODES[2]: [status(3, 900, tablet_incarnation=other)],
    }
    found = judged((1,), told, committed_config=config)
    assert [s.replica_id for s in found.survivors] == [2, 3]
    assert "an earlier recovery gave it up: it is of incarnation 1-0000000009" in [
        m.state for m in found.voters
    ]


def test_the_catalog_and_what_does_not_run_are_refused() -> None:
    assert "only a RUNNING tablet" in judged((1, 2), {}, state="CREATING").refused
    assert "cmeta rewrite" in judged((1, 2), {}, tablet_id=bytes(16)).refused

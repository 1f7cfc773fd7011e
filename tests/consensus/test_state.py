"""The table of replica states, and who is told why a state changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from stele.consensus.state import LifeEvent, ReplicaState, Standing, next_state
from stele.model.config import Configuration
from stele.model.errors import Code, NotLeader, Retryable, SteleError
from stele.model.ids import ReplicaId, TabletId
from stele.raft.effects import Role, RoleChanged
from tests.consensus.cluster import Group, Network, TestNode

ONE = Configuration(-1, ())
TAKES_PART = {ReplicaState.CONFIGURING, ReplicaState.RUNNING}


@pytest.mark.parametrize("state", ReplicaState)
@pytest.mark.parametrize("event", LifeEvent)
def test_a_replica_that_failed_only_stops_and_one_that_stopped_stays_so(
    state: ReplicaState, event: LifeEvent
) -> None:
    after = next_state(state, event)
    if state is ReplicaState.STOPPED or event is LifeEvent.STOPPED:
        assert after is ReplicaState.STOPPED
    elif state is ReplicaState.FAILED or event is LifeEvent.FAILED:
        assert after is ReplicaState.FAILED
    elif event is LifeEvent.STARTED:
        assert after is (ReplicaState.CONFIGURING if state is ReplicaState.BOOTSTRAPPING else state)
    elif state in TAKES_PART:
        wanted = {
            LifeEvent.ROLE_CHANGED: ReplicaState.CONFIGURING,
            LifeEvent.TERM_COMMITTED: ReplicaState.RUNNING,
        }
        assert after is wanted[event]
    else:
        assert after is ReplicaState.BOOTSTRAPPING


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    node = TestNode(Network(), tmp_path)
    group = Group([node])
    group.tablet_id = TabletId("7" * 32)
    return Standing(group.superblock(1), node, 300)


def refusal(call: Callable[[], None]) -> SteleError:
    with pytest.raises(SteleError) as caught:
        call()
    return caught.value


def test_each_change_tells_its_cause(standing: Standing) -> None:
    with structlog.testing.capture_logs() as told:
        standing.begin(3, ONE, ONE)
        standing.role_changed(RoleChanged(Role.LEADER, 4, ReplicaId(1), "2 of 3 votes", serves=True))
        standing.term_committed()
        assert standing.leads
        assert standing.fail("its log is damaged")
        assert not standing.fail("another reason")
        assert standing.stop("its node stops")
        assert not standing.stop("its node stops")
    changes: list[tuple[Any, ...]] = [(line["event"], line["state"], line["cause"]) for line in told]
    assert changes == [
        ("state", "CONFIGURING", "its log was replayed, at term 3"),
        ("role", "CONFIGURING", "2 of 3 votes"),
        ("state", "RUNNING", "an entry of term 4 is committed"),
        ("state", "FAILED", "its log is damaged"),
        ("state", "STOPPED", "its node stops"),
    ]
    assert standing.error == "its log is damaged"


def test_who_does_not_lead_says_why(standing: Standing) -> None:
    replays = refusal(standing.check_leader)
    assert isinstance(replays, Retryable) and replays.code is Code.NOT_READY
    standing.begin(3, ONE, ONE)
    assert isinstance(refusal(standing.check_leader), NotLeader)
    standing.role_changed(RoleChanged(Role.LEADER, 4, ReplicaId(1), "it won", serves=False))
    assert not standing.leads  # a witness serves nobody
    standing.role_changed(RoleChanged(Role.LEADER, 4, ReplicaId(1), "its rows are here", serves=True))
    standing.check_leader()
    standing.fail("its disk is damaged")
    assert isinstance(refusal(standing.check_leader), NotLeader)

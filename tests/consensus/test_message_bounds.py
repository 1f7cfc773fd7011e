"""What another node may send to a replica and no sound one does: dropped and told, and the group goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stele.consensus.message_bounds import MessageBounds
from stele.consensus.replica import Replica
from stele.consensus.timestamps import encode_ceiling
from stele.model.bounds import TERM_JUMP_MAX, TERM_MAX, UNCOMMITTED_AHEAD_MAX_US
from stele.model.clock import from_physical_us
from stele.model.config import Configuration, MemberType, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, new_id
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import Role
from stele.raft.messages import Message, TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.consensus.cluster import Group, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.raft.test_core import initial

HUGE = (1 << 64) - 1
CONFIG = initial(3).config
NOW_US = 1_800_000_000_000_000


class Judge:
    """A host of a check alone: most clocks say NOW_US."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.latest = from_physical_us(NOW_US + UNCOMMITTED_AHEAD_MAX_US)

    def latest_time(self) -> int:
        return self.latest

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        self.causes.append(cause)


def checked(term: int = 5) -> tuple[MessageBounds, Judge]:
    judge: Any = Judge()
    core = RaftCore(RaftOptions(), ReplicaId(1), replace(initial(3), term=term), random.Random(1))
    return MessageBounds(core, judge), judge


LAST = OpId(5, 3)


def update(*entries: Entry, commit: int = 0, preceding: OpId = LAST) -> UpdateRequest:
    return UpdateRequest(5, preceding, entries, commit)


def entry(kind: EntryKind = EntryKind.WRITE, payload: bytes = b"", *, time: int = 0, at: int = 4) -> Entry:
    return Entry(5, at, kind, time, payload)


def configuration(config: Configuration) -> Entry:
    return entry(EntryKind.CONFIG, encode_configuration(config))


def ceiling(ahead_us: int) -> Entry:
    return entry(EntryKind.CEILING, encode_ceiling(from_physical_us(NOW_US + ahead_us)))


NODE = NodeId(new_id())
SOUND = [
    update(),
    update(entry(), entry(at=5)),
    update(Entry(3, 1, EntryKind.NOOP, 0, b""), Entry(5, 2, EntryKind.WRITE, 0, b""), preceding=OPID_NONE),
    update(configuration(CONFIG)),
    update(ceiling(5_000_000)),
    update(ceiling(14 * 3_600_000_000)),  # a machine in a wrong time zone led
    update(ceiling(10 * 365 * 86_400_000_000), commit=4),  # committed is committed
    VoteRequest(5 + TERM_JUMP_MAX, OPID_NONE),
]
HOSTILE = [
    ("entries", update(entry(at=5))),
    ("entries", update(entry(), entry(at=6))),
    ("entries", update(entry(at=HUGE))),
    ("entries", update(Entry(6, 4, EntryKind.WRITE, 0, b""))),
    ("entries", update(Entry(4, 4, EntryKind.WRITE, 0, b""))),
    ("entries", update(entry(EntryKind.CEILING, b"short"))),
    ("time", update(entry(EntryKind.CEILING, encode_ceiling(HUGE)))),
    ("time", update(entry(EntryKind.CEILING, encode_ceiling(HUGE)), commit=HUGE)),
    ("time", update(ceiling(UNCOMMITTED_AHEAD_MAX_US + 1))),
    ("time", update(entry(time=HUGE))),
    ("time", update(entry(EntryKind.NOOP, time=HUGE))),
    ("configuration", update(configuration(Configuration(4, ())))),
    (
        "configuration",
        update(
            configuration(Configuration(4, (replace(CONFIG.peers[0], member_type=MemberType.NON_VOTER),)))
        ),
    ),
    ("configuration", update(entry(EntryKind.CONFIG, b""))),
    ("configuration", update(entry(EntryKind.CONFIG, b"\x01[4,"))),
    ("configuration", update(configuration(Configuration(HUGE, CONFIG.peers)))),
    ("configuration", update(configuration(Configuration(4, CONFIG.peers * 2)))),
    ("configuration", update(configuration(Configuration(4, CONFIG.peers * 400)))),
    (
        "configuration",
        update(configuration(Configuration(4, (replace(CONFIG.peers[0], replica_id=ReplicaId(HUGE)),)))),
    ),
    ("term", VoteRequest((1 << 63) - 1, OPID_NONE)),
    ("term", UpdateRequest(HUGE, OPID_NONE, (), 0)),
    ("term", TimeoutNow(HUGE)),
]


@pytest.mark.parametrize("message", SOUND)
def test_what_sound_replicas_send_passes(message: Message) -> None:
    one, judge = checked()
    assert one.admit(NODE, message) is message and not judge.causes


@pytest.mark.parametrize(("cause", "message"), HOSTILE)
def test_what_no_sound_replica_sends_is_dropped_and_told(cause: str, message: Message) -> None:
    one, judge = checked()
    assert one.admit(NODE, message) is None
    assert judge.causes == [cause]


@pytest.mark.parametrize(
    "message",
    [
        UpdateRequest(TERM_MAX, OPID_NONE, (), 0),
        UpdateResponse(TERM_MAX, True, OpId(1, 1)),
        VoteRequest(TERM_MAX, OPID_NONE, pre_vote=True),
        VoteResponse(TERM_MAX, False),
        TimeoutNow(TERM_MAX),
    ],
)
def test_a_replica_that_lags_by_many_terms_is_led_up_in_steps(message: Message) -> None:
    """It must never be locked out; and one message may not end a tablet's terms."""
    one, judge = checked()
    assert one.admit(NODE, message) == UpdateResponse(5 + TERM_JUMP_MAX, False)
    assert not judge.causes


async def three(group_of: MakeGroup) -> tuple[Group, Replica, Replica]:
    """A group with ten rows, its leader, and a follower that has them all."""
    group, _ = await group_of(3)
    await group.write(rows(range(10)))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(follower)
    return group, leader, follower


def hostile(leader: Replica) -> list[Message]:
    """As the leader's node would send them, of its own term."""
    core = leader.core
    assert core is not None
    term, last = leader.term, core.log.last_opid

    def one(kind: EntryKind, payload: bytes = b"", *, gap: int = 1, time: int = 0) -> UpdateRequest:
        return UpdateRequest(term, last, (Entry(term, last.index + gap, kind, time, payload),), HUGE)

    return [
        one(EntryKind.WRITE, gap=5),
        one(EntryKind.WRITE, time=HUGE),
        one(EntryKind.CEILING, encode_ceiling(HUGE)),
        one(EntryKind.CEILING, b"?"),
        one(EntryKind.CONFIG, encode_configuration(Configuration(last.index + 1, ()))),
        one(EntryKind.CONFIG, b"?"),
        UpdateRequest((1 << 63) - 1, last, (), HUGE),
        VoteRequest((1 << 63) - 1, OpId(term, HUGE), ignore_live_leader=True),
    ]


async def test_hostile_messages_cost_a_group_nothing(group_of: MakeGroup) -> None:
    """Each of them ended a replica, or the whole tablet, and some of them after every restart too."""
    group, leader, follower = await three(group_of)
    node, term = group.node_of(follower), leader.term
    for message in hostile(leader):
        before = len(node.drops)
        follower.on_message(leader.host.node_id, leader.replica_id, message)
        assert len(node.drops) == before + 1, message
    await group.write(rows([10]))
    await group.all_applied()
    assert leader.term == term and leader.role is Role.LEADER
    assert all(replica.running and not replica.error for replica in group.replicas())


async def test_nobody_speaks_as_a_replica_of_another_node(group_of: MakeGroup) -> None:
    group, leader, follower = await three(group_of)
    node, term = group.node_of(follower), leader.term
    (third,) = [r for r in group.replicas() if r not in (leader, follower)]
    for sender in (leader.replica_id, follower.replica_id):
        vote = VoteRequest(term + 1, OpId(term, HUGE), ignore_live_leader=True)
        follower.on_message(third.host.node_id, sender, vote)
    assert [cause for _, cause, _ in node.drops] == ["sender", "sender"]
    claim = UpdateRequest(term, OPID_NONE, (), HUGE)
    leader.on_message(follower.host.node_id, follower.replica_id, claim)
    await wait_until(lambda: bool(group.node_of(leader).drops))
    await group.write(rows([10]))
    assert leader.term == term and leader.role is Role.LEADER and leader.running


async def test_strangers_are_remembered_in_bounds(group_of: MakeGroup) -> None:
    """One in no configuration known here may be a peer of a later one, so it is answered."""
    group, leader, _ = await three(group_of)
    stranger = NodeId(new_id())
    for number in range(100, 3_000):
        leader.on_message(stranger, ReplicaId(number), TimeoutNow(1))
    assert len(leader.members.node_of) <= 1_024
    await group.write(rows([10]))
    await group.all_applied()

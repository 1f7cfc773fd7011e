"""Codec of catalog rows, placement, merging of reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.master.liveness import REPORTS_AT_ONCE, Liveness
from stele.master.placement import Candidate, Placement, check_replication_factor
from stele.master.records import (
    ClaimRecord,
    ClusterRecord,
    IntentRecord,
    NodeRecord,
    TableRecord,
    TabletRecord,
)
from stele.master.row_encoding import decode, encode
from stele.master.tables import parse
from stele.model import bounds
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import NodeId, OpId, ReplicaId, TableId, TabletId
from stele.model.partition import Partition
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb

N1, N2 = NodeId("1" * 32), NodeId("2" * 32)
T1 = TabletId("a" * 32)
CONFIG = Configuration(
    7,
    (
        Peer(N1, ReplicaId(1), "10.0.0.1:7050"),
        Peer(N2, ReplicaId(4), "10.0.0.2:7050", MemberType.WITNESS, witness_start=OpId(2, 5)),
    ),
)
ROWS = [
    ClusterRecord("c" * 32, 1, 3),
    ClaimRecord("operator", 4, 99),
    TableRecord(TableId("b" * 32), "flüge", "RUNNING", "{}", "{}", 3, "table", 5),
    TabletRecord(
        T1, TableId("b" * 32), 2, "CREATING", Partition((1,), b"\x00a", b"\xff"), 5, CONFIG, 3, N1, 5, (1, 4)
    ),
    NodeRecord(
        N1, "node", "ACTIVE", True, "n-1", "10.0.0.1:7050", "10.0.0.1:7052", 7080, "m1", "z1", "0.1.0"
    ),
    IntentRecord(T1, ReplicaId(4), N2, "replace", 3, 7, 99, N1, 2, True, OpId(2, 5), "it is dead"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: type(r).__name__)
def test_a_row_comes_back_as_it_was(row: object) -> None:
    assert decode(type(row), encode(row)) == row  # type: ignore[type-var]


def test_a_row_from_before_a_field_means_its_default() -> None:
    row = b'\x01["%s","node","ACTIVE",true,"n-1","","",0,"","","",""]' % N1.encode()
    assert decode(NodeRecord, row) == NodeRecord(N1, "node", "ACTIVE", True, "n-1")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: type(r).__name__)
def test_a_row_of_a_later_program_comes_back_whole(row: object) -> None:
    later = encode(row)[:-1] + b',"added",[1.5,null],{"b":1,"a":"x"}]'
    read = decode(type(row), later)  # type: ignore[type-var]
    assert read == row and encode(read) == encode(replace(read)) == later  # type: ignore[type-var]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: type(r).__name__)
def test_an_unknown_version_or_shape_is_refused_and_is_no_damage(row: object) -> None:
    for unknown in (b"\x7f" + encode(row)[1:], b"\x7f\xff", b"\x01[]", b'\x01{"0":1}', b'\x01"abcdefghijkl"'):
        if unknown == b"\x01[]" and isinstance(row, ClaimRecord):
            continue  # all of its fields have a default
        with pytest.raises(Rejected, match="upgrade this program") as refused:
            decode(type(row), unknown)  # type: ignore[type-var]
        assert refused.value.code is Code.UNSUPPORTED_VERSION


def test_a_value_with_more_in_it_than_this_program_knows_is_refused() -> None:
    """Written back it would have lost what it had more."""
    tablet, intent = (
        next(r for r in ROWS if isinstance(r, TabletRecord)),
        next(r for r in ROWS if isinstance(r, IntentRecord)),
    )
    for kind, row, known, more in (
        (TabletRecord, tablet, b'[[1],"0061","ff"]', b'[[1],"0061","ff",7]'),
        (IntentRecord, intent, b"[2,5]", b"[2,5,7]"),
    ):
        assert encode(row).count(known) == 1
        with pytest.raises(Rejected, match="upgrade this program"):
            decode(kind, encode(row).replace(known, more))  # type: ignore[type-var]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: type(r).__name__)
def test_bytes_that_are_no_row_are_damage(row: object) -> None:
    for cut in range(len(encode(row))):
        with pytest.raises(Corrupt):
            decode(type(row), encode(row)[:cut])  # type: ignore[type-var]
    with pytest.raises(Corrupt):
        decode(type(row), b"\x00" + encode(row)[1:])  # type: ignore[type-var]


nodes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=10)


@given(nodes, st.sampled_from([1, 3, 5]), st.integers(1, 10))
def test_placement_spreads(spec: list[tuple[int, int, int]], rf: int, tablets: int) -> None:
    candidates = [
        Candidate(NodeId(f"{i:032x}"), f"m{m}", f"z{z}", load) for i, (m, z, load) in enumerate(spec)
    ]
    machine = {c.node_id: c.machine for c in candidates}
    placement = Placement(candidates)
    for _ in range(tablets):
        if placement.machines < rf:
            with pytest.raises(Retryable):
                placement.choose(rf)
            return
        chosen = placement.choose(rf)
        assert len({machine[n] for n in chosen}) == rf


def test_a_full_node_is_chosen_last() -> None:
    """It had the fewest replicas, so that a tablet that it could not make was placed there again, and again."""
    candidates = [Candidate(NodeId(f"{i:032x}"), f"m{i}", f"z{i}", 5 * i, full=i == 0) for i in range(3)]
    assert NodeId(f"{0:032x}") not in Placement(candidates).choose(1)
    assert len(Placement(candidates).choose(3)) == 3


def test_placement_uses_every_zone_and_balances_leaders() -> None:
    candidates = [Candidate(NodeId(f"{i:032x}"), f"m{i}", f"z{i % 3}", 0) for i in range(6)]
    zone = {c.node_id: c.zone for c in candidates}
    placement = Placement(candidates)
    chosen = [placement.choose(3) for _ in range(12)]
    assert all(len({zone[n] for n in nodes}) == 3 for nodes in chosen)
    leaders = [nodes[0] for nodes in chosen]
    assert max(leaders.count(n) for n in set(leaders)) == 2
    assert all(sum(n.node_id in nodes for nodes in chosen) == 6 for n in candidates)


def test_leaders_of_new_tablets_go_to_nodes_that_lead_few() -> None:
    """Each batch of new tablets began to count anew, so that the first nodes led most, and a driver had to move them."""
    candidates = [Candidate(NodeId(f"{i:032x}"), f"m{i}", "z", 9, leads=i) for i in (2, 0, 1)]
    placement = Placement(candidates)
    assert [int(placement.choose(3)[0], 16) for _ in range(6)] == [0, 0, 1, 0, 1, 2]


def test_of_nodes_alike_the_one_whose_machine_has_fewer_is_chosen() -> None:
    machines = ("m0", "m0", "m1", "m2")
    candidates = [Candidate(NodeId(f"{i:032x}"), machine, "z", 0) for i, machine in enumerate(machines)]
    placement = Placement(candidates)
    assert [int(placement.choose(1)[0], 16) for _ in range(6)] == [0, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("rf", [0, 2, 4, 7])
def test_replication_factors_that_cannot_be(rf: int) -> None:
    with pytest.raises(Rejected):
        check_replication_factor(rf, 5, 5)


@pytest.mark.parametrize("rf", [0, 2, 9, 11])
def test_a_new_table_has_a_factor_that_it_could_be_given_later(rf: int) -> None:
    """A table of factor 9 was made, though `stele table set-rf` and TabletGroups refuse 9."""
    with pytest.raises(Rejected, match=f"replication factor {rf}: expected 1, 3, 5 or 7"):
        check_replication_factor(rf, 20, 20)


def test_a_replication_factor_that_waits_for_nodes_that_are_silent_may_be_asked_for_again() -> None:
    """Found by tests/linear: a table was refused for good because a node restarted."""
    check_replication_factor(3, 3, 4)
    with pytest.raises(Retryable, match="only 2 of 4 machines with ACTIVE nodes answer") as silent:
        check_replication_factor(3, 2, 4)
    assert silent.value.code is Code.NOT_READY


def beat(
    sequence: int, *, incremental: bool = False, incarnation: int = 1, **fields: object
) -> pb.TSHeartbeatRequest:
    return pb.TSHeartbeatRequest(
        node_id=id_to_pb(N1),
        incarnation=incarnation,
        sequence=sequence,
        incremental=incremental,
        has_report=True,
        **fields,  # type: ignore[arg-type]
    )


def status(tablet: str, replica_id: int, term: int = 1) -> common_pb2.ReplicaStatusPB:
    return common_pb2.ReplicaStatusPB(tablet_id=id_to_pb(tablet), replica_id=replica_id, term=term)


def hear(life: Liveness, request: pb.TSHeartbeatRequest, now_ms: int) -> list[str]:
    life.heard(request, now_ms)
    return asyncio.run(life.merge(request, now_ms))


def proven(life: Liveness, request: pb.TSHeartbeatRequest, now_ms: int) -> None:
    """Heard twice; in between, a process at its address has confirmed this start."""
    life.heard(request, now_ms).proven = True
    life.heard(request, now_ms)


def test_reports_merge_only_into_a_full_one() -> None:
    life = Liveness(0)
    assert hear(life, beat(1, incremental=True, tablets=[status(T1, 1)]), 10) == []
    assert not life.nodes[N1].full
    assert hear(life, beat(2, tablets=[status(T1, 1), status("b" * 32, 1)]), 20) == [T1, "b" * 32]
    assert hear(life, beat(3, incremental=True, tablets=[status(T1, 1, term=5)]), 30) == [T1]
    report = life.report(T1, N1, 1)
    assert report is not None and report.status.term == 5 and report.at_ms == 30
    late = beat(3, incremental=True, tablets=[status(T1, 1, term=4)])
    assert hear(life, late, 40) == [] and not life.nodes[N1].full


def test_an_adopted_master_tells_only_of_nodes_that_registered_since_it_began() -> None:
    """Its catalog is a copy. The addresses in it may be those of the cluster that was copied."""
    row = NodeRecord(N1, "node", "ACTIVE", True, "n-1", "10.0.0.1:7050", "10.0.0.1:7052")
    own, copied = Liveness(0), Liveness(0, adopted=True)
    peer = CONFIG.peers[0]
    assert own.located(row) == row and own.peer_address(peer) == "10.0.0.1:7050"
    assert copied.located(row) == replace(row, address="", flight_address="")
    assert copied.peer_address(peer) == ""
    request = beat(1)
    request.registration.address, request.registration.flight_address = "10.9.0.1:7050", "10.9.0.1:7052"
    copied.heard(request, 10)
    assert copied.located(row) == replace(row, address="10.9.0.1:7050", flight_address="10.9.0.1:7052")


async def began(life: Liveness, tablets: list[str]) -> asyncio.Task[list[str]]:
    """The merge of a report that takes more than one step, after its first."""
    life.heard(beat(1), 10)
    merging = asyncio.ensure_future(life.merge(beat(1, tablets=[status(t, 1) for t in tablets]), 10))
    while not life.nodes[N1].tablets:
        await asyncio.sleep(0)
    assert len(life.nodes[N1].tablets) < len(tablets) and not life.nodes[N1].full
    return merging


LARGE = [f"{n:032x}" for n in range(1, 3 * REPORTS_AT_ONCE)]


@pytest.mark.parametrize("meanwhile", ["nothing", "a new start", "a new leadership"])
async def test_a_large_report_is_merged_in_steps_and_dropped_once_it_is_outdated(meanwhile: str) -> None:
    """Two thousand replicas took 20 ms in one step."""
    life = Liveness(0)
    merging = await began(life, LARGE)
    waiting = asyncio.ensure_future(life.merge(beat(2, incremental=True, tablets=[status(T1, 1)]), 20))
    await asyncio.sleep(0)
    if meanwhile == "a new start":
        life.heard(beat(1, incarnation=2), 20)
    elif meanwhile == "a new leadership":
        life.begin_leading(20)
    touched, then = await merging, await waiting
    known = set(life.reported())
    if meanwhile == "nothing":
        assert touched == LARGE and then == [T1] and known == {*LARGE, T1} and life.nodes[N1].full
    else:
        assert then == [], "it was told of the start, or in the leadership, before"
        assert not known and not life.nodes[N1].full
    assert known == life.nodes[N1].tablets


async def test_each_large_report_counts_also_if_its_node_waits_no_longer() -> None:
    """Each one was dropped for the next one, for ever, where a merge took longer than a node waits for its answer."""
    life = Liveness(0)
    merging = await began(life, LARGE)
    merging.cancel()
    later = asyncio.ensure_future(life.merge(beat(2, tablets=[status(T1, 1)]), 20))
    await asyncio.sleep(0)
    assert set(life.reported()) < {*LARGE}
    while not life.nodes[N1].full:
        await asyncio.sleep(0)
    assert set(life.reported()) == {*LARGE}
    assert sorted(await later) == sorted({*LARGE, T1})
    assert set(life.reported()) == {T1} and life.nodes[N1].full


def test_a_removal_asks_for_a_full_report_and_drops_nothing_on_a_guess() -> None:
    life = Liveness(0)
    hear(life, beat(1, tablets=[status(T1, 1), status(T1, 5)]), 10)
    assert hear(life, beat(2, incremental=True, removed_tablets=[id_to_pb(T1)]), 20) == [T1]
    assert not life.nodes[N1].full and life.report(T1, N1, 5) is not None
    hear(life, beat(3, tablets=[status(T1, 5)]), 30)
    assert life.nodes[N1].full and life.report(T1, N1, 1) is None


def test_a_restart_forgets_and_an_older_incarnation_is_refused() -> None:
    life = Liveness(0)
    hear(life, beat(9, tablets=[status(T1, 1)]), 10)
    hear(life, beat(1, incarnation=2, incremental=True, tablets=[]), 15)
    assert life.reports_of(T1) == [] and not life.nodes[N1].full, "what it told before may be true no more"
    hear(life, beat(2, incarnation=2, tablets=[]), 20)
    assert life.reports_of(T1) == [] and life.nodes[N1].full
    with pytest.raises(Rejected) as refused:
        life.heard(beat(10), 30)
    assert refused.value.code is Code.STALE_INCARNATION


def test_a_node_that_lost_what_it_told_is_refused_and_not_heard() -> None:
    """An older copy of its volume, put back: its log ends before what the first process said was durable."""
    life = Liveness(0)
    proven(life, beat(1, incarnation=4, start=77, log_found=100, log_synced=900, vetted=True), 10)
    for incarnation, start, found, code in (
        (3, 78, 900, Code.STALE_INCARNATION),
        (3, 78, 899, Code.VOLUME_OLD),
        (4, 78, 900, Code.VOLUME_OLD),
        (5, 78, 899, Code.VOLUME_OLD),
        (4, 77, 100, None),
        (5, 78, 900, None),
        (6, 79, 0, None),  # damage: its log cannot tell, and its replicas are FAILED
    ):
        request = beat(
            1, incarnation=incarnation, start=start, log_found=found, log_synced=900, vetted=code is None
        )
        if code is None:
            life.heard(request, 30)
            continue
        with pytest.raises(Rejected) as refused:
            life.heard(request, 20)
        assert refused.value.code is code
        assert life.nodes[N1].heard_ms == 10, "it counts as silent"


def test_a_start_that_was_not_vetted_judges_nobody() -> None:
    """It may be the older copy; the newest volume, put back, has the same number."""
    life = Liveness(0)
    proven(life, beat(1, incarnation=4, start=77, log_synced=900, vetted=True), 10)
    proven(life, beat(1, incarnation=5, start=78, log_found=900, log_synced=5_000), 20)
    proven(life, beat(1, incarnation=5, start=79, log_found=950, log_synced=1_000, vetted=True), 30)
    told = life.nodes[N1].last_start
    assert told is not None and told == life.nodes[N1].registered == (5, 79, 1_000)
    life.heard(beat(2, incarnation=5, start=79, log_found=950, log_synced=990, vetted=True), 40)
    assert life.nodes[N1].last_start == told, "a late heartbeat takes nothing back"
    with pytest.raises(Rejected) as refused:  # it ran on this volume before the newest start
        life.heard(beat(9, incarnation=4, start=77, log_found=100, log_synced=900, vetted=True), 50)
    assert refused.value.code is Code.STALE_INCARNATION


def test_a_volume_that_was_taken_back_is_asked_for_a_later_number_alone() -> None:
    life = Liveness(0)
    proven(life, beat(1, incarnation=4, start=77, log_synced=900, vetted=True), 10)
    for incarnation in (3, 4):
        with pytest.raises(Rejected) as refused:
            life.heard(beat(1, incarnation=incarnation, start=78, log_found=100, taken_back=True), 20)
        assert refused.value.code is Code.STALE_INCARNATION
    accepted = beat(1, incarnation=5, start=78, log_found=100, log_synced=150, vetted=True, taken_back=True)
    proven(life, accepted, 30)
    assert life.nodes[N1].last_start == (5, 78, 150)
    life.heard(beat(1, incarnation=6, start=79, log_found=150), 40)


def test_what_no_process_has_confirmed_judges_nobody() -> None:
    """Whoever speaks in a node's name while it is down could have its volume refused for ever."""
    life = Liveness(0)
    proven(life, beat(1, incarnation=4, start=77, log_synced=900, vetted=True), 10)
    life.heard(beat(1, incarnation=5, start=6, log_synced=1 << 60, vetted=True), 20)
    assert life.nodes[N1].last_start == (4, 77, 900)
    life.heard(beat(1, incarnation=5, start=78, log_found=950), 30)


def test_before_there_is_a_catalog_a_bounded_number_of_nodes_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "NODES_HEARD_MAX", 1)
    life = Liveness(0)
    hear(life, beat(1, tablets=[status(T1, 1)]), 10)
    stranger = beat(1)
    stranger.node_id = id_to_pb(N2)
    with pytest.raises(Retryable) as refused:
        life.heard(stranger, 10)
    assert refused.value.code is Code.THROTTLED
    life.heard(beat(2), 20)
    life.forget_strangers({N2})
    assert not life.nodes and not life.reports_of(T1)
    life.heard(stranger, 30)


def test_silence_counts_from_the_beginning_of_leading() -> None:
    life = Liveness(0)
    hear(life, beat(1), 1_000)
    life.begin_leading(1_000)
    assert life.age_ms(N1, 1_500) == 500 and not life.ever_heard(N1)
    assert life.age_ms(N2, 1_500) == 500
    life.heard(beat(2), 1_600)
    assert life.age_ms(N1, 1_700) == 100 and life.ever_heard(N1)


def test_after_a_stall_of_its_own_a_master_takes_nobody_for_silent() -> None:
    life = Liveness(0)
    life.heard(beat(1), 1_000)
    for now in range(2_000, 9_000, 1_000):
        life.awake(now)
    assert life.age_ms(N1, 9_000) == 8_000
    life.awake(60_000)  # stopped, and continued
    assert life.age_ms(N1, 60_500) == 500 and not life.ever_heard(N1)
    life.heard(beat(2), 60_600)
    assert life.ever_heard(N1) and life.age_ms(N2, 61_000) == 1_000


@pytest.mark.parametrize("name", ["", "  ", "\u00a0", "a\nb", "a\tb", "\x1b[31m", "x" * 257])
def test_a_name_that_no_line_can_show_is_refused(name: str) -> None:
    with pytest.raises(Rejected, match=r"expected 1 to 256, not blank, no control characters"):
        parse(pb.CreateTableRequest(name=name, kind="keyspace"), 1 << 20, 0)


@pytest.mark.parametrize("name", ["flüge", "a b", "a/b!", "x" * 256])
def test_a_name_may_be_any_text(name: str) -> None:
    assert parse(pb.CreateTableRequest(name=name, kind="keyspace"), 1 << 20, 0).name == name

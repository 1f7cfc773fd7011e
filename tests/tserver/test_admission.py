"""Whose word lets a start open its replicas, and when masters may count on what it tells."""

from __future__ import annotations

import asyncio

import pytest

from stele.model.errors import Code, Rejected, StartRefused
from stele.model.ids import NodeId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from stele.tserver.admission import Admission
from stele.tserver.admission_votes import AdmissionVotes, newest

A, B, C, D, E, NODE = (NodeId(f"{n:032x}") for n in range(1, 7))


def answer(master: NodeId, *masters: NodeId, leads: bool = False, term: int = 1) -> pb.TSHeartbeatResponse:
    return pb.TSHeartbeatResponse(
        node_id=id_to_pb(master),
        is_leader=leads,
        term=term,
        masters=[pb.MasterInfoPB(node_id=id_to_pb(m)) for m in masters],
    )


def verdict(votes: AdmissionVotes, *answers: pb.TSHeartbeatResponse) -> tuple[bool, bool]:
    """(may open, admitted)"""
    for one in answers:
        votes.answered(address(one), one)
    return votes.may_open, votes.admitted


def address(response: pb.TSHeartbeatResponse) -> str:
    """Where the master that sent this answer listens."""
    return f"h{response.node_id[-1]}:1"


def test_a_node_needs_the_leader_and_a_majority_with_a_catalog() -> None:
    assert verdict(AdmissionVotes(NODE, "node", 3), answer(A), answer(B), answer(C)) == (False, False)
    assert verdict(AdmissionVotes(NODE, "node", 3), answer(A, A, B, C), answer(B, A, B, C)) == (False, False)
    assert verdict(AdmissionVotes(NODE, "node", 3), answer(A, A, B, C, leads=True), answer(B)) == (
        False,
        False,
    )
    both = answer(A, A, B, C, leads=True), answer(B, A, B, C)
    assert verdict(AdmissionVotes(NODE, "node", 6), *both) == (True, True), (
        "however many addresses were given"
    )
    assert verdict(AdmissionVotes(NODE, "node", 1), answer(A, A, leads=True)) == (True, True)


def test_masters_that_are_none_any_more_do_not_count() -> None:
    old = answer(A, A, B, D, term=1), answer(B, A, B, D, term=1)
    new = answer(C, C, leads=True, term=2)
    assert verdict(AdmissionVotes(NODE, "node", 3), *old) == (False, False)
    one_of_three = answer(C, C, D, E, leads=True, term=2)
    assert verdict(AdmissionVotes(NODE, "node", 3), *old, one_of_three) == (False, False)
    assert verdict(AdmissionVotes(NODE, "node", 3), *old, new) == (True, True)


def test_half_of_the_masters_are_no_majority() -> None:
    """The other half may remember a newer start."""
    assert verdict(AdmissionVotes(NODE, "node", 2), answer(A, A, B, leads=True)) == (False, False)
    four = answer(A, A, B, C, D, leads=True), answer(B, A, B, C, D)
    assert verdict(AdmissionVotes(NODE, "node", 4), *four) == (False, False)
    assert verdict(AdmissionVotes(NODE, "node", 4), *four, answer(C, A, B, C, D)) == (True, True)


def test_the_list_of_masters_may_change_within_a_term() -> None:
    """One was added: a majority of those before is none of those that there are."""
    before, after = answer(B, A, B), answer(A, A, B, C, D, leads=True)
    assert verdict(AdmissionVotes(NODE, "node", 4), before, after) == (False, False)


def test_a_master_may_open_on_all_others_word_and_is_admitted_only_by_a_leader() -> None:
    assert verdict(AdmissionVotes(A, "master", 3), answer(A), answer(B)) == (False, False)
    assert verdict(AdmissionVotes(A, "master", 3), answer(B), answer(C)) == (True, False)
    assert verdict(AdmissionVotes(A, "master", 3), answer(B, A, B, C), answer(C)) == (True, False)
    led = answer(B, A, B, C, leads=True), answer(A, A, B, C)
    assert verdict(AdmissionVotes(A, "master", 3), *led) == (True, True)
    assert verdict(AdmissionVotes(A, "master", 1)) == (True, False)
    assert verdict(AdmissionVotes(A, "master", 1), answer(A, A, leads=True)) == (True, True)


def says(master: NodeId, code: Code, newest: int = 5, masters: int = 3) -> StartRefused:
    return StartRefused("no", code=code, master=master, masters=masters, newest=newest)


OLD, STALE = Code.VOLUME_OLD, Code.STALE_INCARNATION


@pytest.mark.parametrize(
    ("refusals", "code"),
    [
        ([says(A, OLD)], None),
        ([says(A, OLD), says(A, OLD)], None),
        ([says(A, OLD), says(B, OLD)], OLD),
        ([says(A, OLD), says(B, STALE)], STALE),
        ([says(A, OLD), says(B, STALE), says(C, OLD)], OLD),
        ([says(A, STALE), says(B, STALE)], STALE),
        ([says(A, OLD, masters=5), says(B, OLD, masters=5)], None),
        ([says(A, OLD, masters=1)], OLD),
        ([says(A, OLD, masters=0)], None),
        ([says(A, OLD, masters=0), says(B, OLD, masters=0)], OLD),
    ],
)
def test_a_majority_of_the_masters_ends_a_start_and_no_single_one(
    refusals: list[StartRefused], code: Code | None
) -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    for number, refusal in enumerate(refusals):
        votes.refused(f"h{number}:1", refusal)
    verdict = votes.verdict
    assert (verdict.code if verdict else None) is code
    assert votes.doubt is not None


def test_of_doubts_the_next_start_learns_the_newest_number() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    for master, number in ((A, 5), (B, 9), (C, 7)):
        votes.refused("", says(master, STALE, number))
    assert votes.doubt is not None and newest(votes.doubt) == 9


def test_a_master_that_vouches_again_refuses_no_more() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    votes.refused("", says(A, STALE))
    votes.answered("h1:1", answer(A, A, B, C))
    votes.refused("", says(B, STALE))
    assert votes.verdict is None


def test_a_refusal_takes_back_the_word_before_it_until_the_start_is_admitted() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    votes.answered("h1:1", answer(A, A, B, C, leads=True))
    votes.refused("", says(A, OLD))
    assert verdict(votes, answer(B, A, B, C)) == (False, False)
    assert verdict(votes, answer(C, A, B, C)) == (False, False), "the leader refuses"
    assert verdict(votes, answer(A, A, B, C, leads=True)) == (True, True)
    votes.refused("", says(B, OLD))
    assert votes.admitted and votes.verdict is None


def test_masters_of_a_release_that_does_not_name_itself_count_by_address() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    votes.refused("a:1", Rejected("no", code=OLD))
    assert votes.verdict is None
    votes.refused("b:1", Rejected("no", code=OLD))
    assert votes.verdict is not None


def test_a_master_of_the_version_before_refuses_no_more_once_it_accepts() -> None:
    """Its refusal was kept under its address, where no acceptance was looked for: the start was doubted for good."""
    votes = AdmissionVotes(NODE, "node", 3)
    votes.refused("a:1", Rejected("no", code=STALE))
    votes.answered("a:1", answer(A, A, B, C))
    assert votes.doubt is None
    votes.refused("b:1", Rejected("no", code=STALE))
    assert votes.verdict is None


def test_a_master_of_the_version_before_counts_once_under_two_addresses() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    for one in ("a:1", "name:1"):
        votes.answered(one, answer(A, A, B, C))
        votes.refused(one, Rejected("no", code=OLD))
    assert votes.verdict is None


def test_a_refusal_of_the_version_before_takes_back_its_word() -> None:
    votes = AdmissionVotes(NODE, "node", 3)
    votes.answered("a:1", answer(A, A, B, C))
    votes.refused("a:1", Rejected("no", code=OLD))
    assert verdict(votes, answer(B, A, B, C, leads=True)) == (False, False)


def test_a_leader_that_refuses_has_not_vouched() -> None:
    """The others' word made up for the leader's, which alone has read all of the catalog."""
    votes = AdmissionVotes(NODE, "node", 3)
    votes.answered("h1:1", answer(A, A, B, C, leads=True))
    votes.refused("h1:1", says(A, OLD))
    assert verdict(votes, answer(B, A, B, C), answer(C, A, B, C)) == (False, False)
    assert verdict(votes, answer(B, A, B, C, leads=True, term=2)) == (True, True)


async def test_a_doubt_that_its_master_takes_back_keeps_nobody_waiting_for_a_leader() -> None:
    """Without masters tablets come back all the same; a start that was doubted once waited until they had a leader."""
    admission = Admission(AdmissionVotes(NODE, "node", 3))
    admission.refused("a:1", says(A, STALE))
    waiting = asyncio.ensure_future(admission.wait_undoubted())
    admission.answered("b:1", answer(B, A, B, C))
    for _ in range(3):
        await asyncio.sleep(0)
    assert admission.doubted and not waiting.done()
    admission.answered("a:1", answer(A, A, B, C))
    await waiting
    admission.close()

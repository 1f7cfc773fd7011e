"""What others say of themselves and of each other: which starts are believed, and which numbers are numbers."""

from __future__ import annotations

import pytest

from stele.model import bounds
from stele.model.errors import Code, Rejected
from stele.model.ids import ClusterId, NodeId
from stele.rpc.identity import (
    FROM_INCARNATION_KEY,
    PROTOCOL_KEY,
    Caller,
    Identity,
    PeerBook,
    caller_from_hello,
    caller_from_metadata,
    check,
)

# Fixed: they are in the names of tests, which must be the same in each process that runs some of them.
CLUSTER, HERE, NODE = ClusterId("c" * 32), NodeId("a" * 32), NodeId("b" * 32)
NOW_MS = 1_800_000_000_000


def calls(book: PeerBook, incarnation: int, node_id: str = NODE, address: str = "") -> None:
    """A call of a node is checked here."""
    check(Identity(CLUSTER, HERE, 1), book, Caller(CLUSTER, 1, node_id, "", incarnation, 0, address))


def refused(book: PeerBook, incarnation: int) -> Code:
    with pytest.raises(Rejected) as caught:
        calls(book, incarnation)
    return caught.value.code


@pytest.mark.parametrize("text", ["9" * 5_000, "9" * 21, "²", "-1", "+1", "1e3", "", "٣"])
def test_a_number_in_metadata_is_ascii_digits_and_short(text: str) -> None:
    with pytest.raises(Rejected, match="is not a number") as caught:
        caller_from_metadata([(PROTOCOL_KEY, "1"), (FROM_INCARNATION_KEY, text)])
    assert len(str(caught.value)) < 200


FORK, OTHER = "f" * 32, "e" * 32


@pytest.mark.parametrize(
    ("here", "said", "node", "may"),
    [
        ("", None, NODE, True),  # of a release without fork ids
        ("", "", NODE, True),
        ("", FORK, NODE, False),
        (FORK, FORK, NODE, True),
        (FORK, OTHER, NODE, False),
        (FORK, "", NODE, False),
        (FORK, None, NODE, False),
        (FORK, None, "", True),  # a client that does not know it yet
        ("", None, "", True),
        (FORK, FORK, "", True),
        (FORK, "", "", False),
        ("", FORK, "", False),
    ],
)
def test_two_copies_of_a_cluster_never_speak(here: str, said: str | None, node: str, may: bool) -> None:
    book = PeerBook()
    caller = Caller(CLUSTER, 1, node, "", 5, 0, "h:1", fork_id=said)
    identity = Identity(CLUSTER, HERE, 1, fork_id=here)
    if may:
        check(identity, book, caller)
        return
    with pytest.raises(Rejected, match="two copies of a cluster") as refused_:
        check(identity, book, caller)
    assert refused_.value.code is Code.WRONG_CLUSTER
    assert not book.incarnation(node) and not book.address(node)


@pytest.mark.parametrize("fork_id", [None, "", FORK])
def test_the_fork_id_goes_by_metadata_and_hello_as_it_is(fork_id: str | None) -> None:
    identity = Identity(CLUSTER, HERE, 1, fork_id=fork_id)
    assert caller_from_metadata(identity.metadata()).fork_id == fork_id
    assert caller_from_hello(identity.hello()).fork_id == fork_id


def test_a_start_that_nobody_can_have_reached_is_not_believed() -> None:
    book = PeerBook(lambda: NOW_MS)
    assert refused(book, bounds.INCARNATION_MAX + 1) is Code.INVALID_ARGUMENT
    calls(book, 7)
    assert refused(book, NOW_MS + bounds.INCARNATION_AHEAD_MAX_MS + 1) is Code.INVALID_ARGUMENT
    calls(book, 8)
    book.told(NODE, 8, "h:1")
    assert refused(book, NOW_MS + bounds.INCARNATION_AHEAD_MAX_MS + 1) is Code.INVALID_ARGUMENT
    calls(book, 8)


def test_starts_rise_by_crashes_that_nobody_heard_and_to_the_present_where_a_volume_is_formatted_anew() -> (
    None
):
    book = PeerBook(lambda: NOW_MS)
    for incarnation in (7, 7 + 100_000, NOW_MS, NOW_MS + 1):
        calls(book, incarnation)
        assert book.incarnation(NODE) == incarnation
    assert refused(book, NOW_MS) is Code.STALE_INCARNATION


def test_a_volume_formatted_anew_months_after_the_masters_word_is_heard() -> None:
    """A first master whose volume was emptied 50 days after its cluster was formed was refused by everybody, for good."""
    book = PeerBook(lambda: NOW_MS)
    book.told(NODE, NOW_MS - 100 * 86_400_000, "h:1")
    calls(book, NOW_MS)


def test_a_clock_that_is_ahead_at_the_format_shuts_nobody_out() -> None:
    book = PeerBook(lambda: NOW_MS)
    calls(book, 40 * NOW_MS)
    calls(book, 40 * NOW_MS + 1)


def test_nobody_shuts_out_a_node_that_the_masters_hear() -> None:
    """One hello in its name with a higher incarnation, and every later word of it was refused."""
    book = PeerBook(lambda: NOW_MS)
    book.told(NODE, 7, "h7:1")
    calls(book, 9, address="evil:1")
    calls(book, 7)
    assert book.incarnation(NODE) == 7
    book.told(NODE, 9, "h9:1")
    assert refused(book, 7) is Code.STALE_INCARNATION
    assert book.address(NODE) == "h9:1"


def test_a_later_start_is_dialled_where_it_says_it_is_before_the_masters_tell_of_it() -> None:
    book = PeerBook(lambda: NOW_MS)
    book.told(NODE, 7, "h7:1")
    calls(book, 7, address="elsewhere:1")
    assert book.address(NODE) == "h7:1"
    calls(book, 8, address="h8:1")
    assert book.address(NODE) == "h8:1"


def test_a_forged_start_redirects_dials_only_until_it_is_silent() -> None:
    now = [NOW_MS]
    book = PeerBook(lambda: now[0])
    book.told(NODE, 7, "h7:1")
    calls(book, 9, address="evil:1")
    now[0] += bounds.HEARD_ADDRESS_MS - 1
    assert book.address(NODE) == "evil:1"
    now[0] += 1
    assert book.address(NODE) == "h7:1"
    calls(book, 9, address="evil:1")
    assert book.address(NODE) == "evil:1"
    now[0] += bounds.HEARD_ADDRESS_MS
    book.told(NODE, 9, "h9:1")  # it was a true start after all
    assert book.address(NODE) == "h9:1"


def test_names_of_nodes_that_nobody_knows_take_bounded_memory() -> None:
    book = PeerBook(lambda: NOW_MS)
    for n in range(bounds.PEERS_HEARD_MAX + 10):
        calls(book, 1, f"{n:032x}")
    assert len(book._heard) == bounds.PEERS_HEARD_MAX
    assert book.incarnation(f"{0:032x}") == 0


def test_names_of_nodes_that_nobody_knows_push_out_the_one_heard_longest_ago() -> None:
    """They pushed out the one heard first. So an earlier start of a live node could speak again."""
    book = PeerBook(lambda: NOW_MS)
    for n in range(bounds.PEERS_HEARD_MAX + 10):
        calls(book, 7)
        calls(book, 1, f"{n:032x}")
        assert book.incarnation(NODE) == 7
    assert refused(book, 6) is Code.STALE_INCARNATION


def test_a_caller_of_another_protocol_is_refused() -> None:
    for version in (0, 2):
        with pytest.raises(Rejected, match=f"protocol version {version} is unknown here") as caught:
            check(Identity(CLUSTER, HERE, 1), PeerBook(), Caller(CLUSTER, version, NODE, "", 1, 0))
        assert caught.value.code is Code.UNSUPPORTED_VERSION


def test_the_masters_word_on_a_node_counts_also_where_it_is_lower() -> None:
    """A higher one came of somebody who spoke in its name."""
    book = PeerBook(lambda: NOW_MS)
    book.told(NODE, 900, "forged:1")
    book.told(NODE, 4, "true:1")
    assert (book.incarnation(NODE), book.address(NODE)) == (4, "true:1")
    calls(book, 4)


def test_a_start_that_nobody_can_have_reached_is_refused_also_where_the_node_was_heard() -> None:
    book = PeerBook(lambda: NOW_MS)
    book.observe(NODE, 5, "node:1")
    with pytest.raises(Rejected, match="another process speaks in its name"):
        book.observe(NODE, bounds.INCARNATION_MAX, "forged:1")
    assert book.address(NODE) == "node:1"


def test_an_earlier_start_that_speaks_late_moves_no_address() -> None:
    book = PeerBook(lambda: NOW_MS)
    book.observe(NODE, 5, "new:1")
    book.observe(NODE, 3, "old:1")
    assert (book.incarnation(NODE), book.address(NODE)) == (5, "new:1")

"""A write is applied once whatever happens on the way, and it is told honestly where that is not known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client.sequencer import CLIENT_ID_IDLE_S
from stele.model.errors import Code, Rejected, Retryable, SteleError, error_for
from stele.tablet.exactly_once import IDLE_US
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster


async def test_a_lost_answer_is_asked_for_again_under_the_same_sequence(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        for code in (Code.UNKNOWN_OUTCOME, Code.TIMED_OUT, Code.INTERNAL):
            tablet.after.append(lambda code=code: Retryable("lost", code=code))
        await table.insert({"id": 1, "name": "once"})
        assert len(tablet.attempts) == 4
        assert len({(a.client_id, a.sequence, a.digest) for a in tablet.attempts}) == 1
        with pytest.raises(Rejected) as caught:
            await table.insert({"id": 1, "name": "twice"})
        assert caught.value.code is Code.ALREADY_PRESENT
        assert tablet.attempts[-1].lowest_unfinished == 2


async def test_another_cluster_says_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    async with one_tablet(tmp_path, timeout_s=3.0) as (_, table, tablet):
        stranger = Rejected("this is another cluster", code=Code.WRONG_CLUSTER)
        tablet.after.append(lambda: Retryable("lost", code=Code.UNKNOWN_OUTCOME))
        tablet.before.extend([lambda: None, *[lambda: stranger] * 10_000])
        with pytest.raises(Retryable) as caught:
            await table.insert({"id": 1})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        # Where the machine stands still, the last attempt may have no answer, or that of a node that does not lead.
        for number in range(2, 22):
            with pytest.raises(Retryable) as caught:
                await table.insert({"id": number})
            if "another cluster; nothing was done" in str(caught.value):
                break
        assert "another cluster; nothing was done" in str(caught.value)
        assert caught.value.code is Code.NO_QUORUM


async def test_a_write_is_sent_again_until_it_can_be_done(tmp_path: Path) -> None:
    codes = [
        Code.THROTTLED,
        Code.NOT_READY,
        Code.DISK_FULL,
        Code.SNAPSHOT_NOT_READY,
        Code.STEPPING_DOWN,
        Code.CORRUPT,
        Code.STALE_INCARNATION,
    ]
    async with one_tablet(tmp_path, nodes=1, timeout_s=600) as (_, table, tablet):
        table.locations.tablets[0].incarnation = 7
        tablet.before.extend([lambda code=code: error_for(code, "not now") for code in codes])
        async with asyncio.timeout(60):
            await table.put({"id": 1})
        told = [attempt.tablet_incarnation for attempt in tablet.attempts]
        assert len(told) == len(codes) + 1
        assert (told[0], told[-1]) == (7, 0)  # the masters have been asked meanwhile


async def test_a_node_that_dies_with_the_answer_costs_nothing_but_time(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        stopping: list[asyncio.Task[None]] = []

        def die() -> SteleError | None:
            tablet.leader = 1
            stopping.append(asyncio.ensure_future(cluster.nodes[0].die()))
            return Retryable("gone", code=Code.UNAVAILABLE)

        tablet.after.append(die)
        await table.insert({"id": 1})
        await asyncio.gather(*stopping)
        assert len(tablet.attempts) == 2
        assert await table.scan().count() == 1


async def test_without_a_leader_the_end_is_no_quorum_or_unknown(tmp_path: Path) -> None:
    async with one_tablet(tmp_path, timeout_s=3.0) as (_, table, tablet):
        tablet.leader = -1
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.NO_QUORUM
        tablet.leader = 0

        def lose() -> SteleError:
            tablet.leader = -1
            return Retryable("lost", code=Code.UNKNOWN_OUTCOME)

        tablet.after.append(lose)
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 2})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        tablet.leader = 0
        await table.put({"id": 3})
        assert tablet.attempts[-1].lowest_unfinished == 3


async def test_a_block_that_fails_as_a_whole_is_told(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        victim = next(iter(cluster.tablets.values()))
        victim.before.append(lambda: Rejected("disk on strike", code=Code.PERMISSION_DENIED))
        with pytest.raises(Rejected, match="strike"):
            await table.write_arrow(pa.table({"id": np.arange(10_000)}))


async def test_a_write_that_was_left_stops_sending(tmp_path: Path) -> None:
    """Whoever is cancelled may begin anew at once: what the first writer still held must not come after that."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        cluster.nodes[0].delay_s = 0.2
        rows = pa.table({"id": np.arange(100_000), "n": np.zeros(100_000, np.int32)})
        writing = asyncio.ensure_future(table.write_arrow(rows))
        await asyncio.wait_for(cluster.nodes[0].came.wait(), 60)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        cluster.nodes[0].delay_s = 0.0
        await asyncio.sleep(0.5)
        assert len(tablet.attempts) <= 1


async def test_a_write_that_may_have_been_done_is_not_called_too_large(tmp_path: Path) -> None:
    """Another program's leader may have done it. Called too large it was sent again in halves, under other numbers."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        tablet.after.append(lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE))
        tablet.before.extend([lambda: None, *[lambda: Rejected("too large", code=Code.TOO_LARGE)] * 5])
        with pytest.raises(Retryable) as caught:
            await table.put({"id": 1, "name": "one"})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        assert len({a.sequence for a in tablet.attempts}) == 1


@pytest.mark.parametrize(
    "code",
    [Code.UNAVAILABLE, Code.TIMED_OUT, Code.UNKNOWN_OUTCOME, Code.INTERNAL, Code.IO_ERROR],
    ids=lambda code: code.name,
)
async def test_a_write_whose_one_answer_was_a_failure_may_have_been_done(tmp_path: Path, code: Code) -> None:
    """Whatever is said afterwards: here that nobody leads."""
    async with one_tablet(tmp_path, timeout_s=3.0) as (_, table, tablet):

        def fail() -> SteleError:
            tablet.leader = -1
            return Retryable("a fault", code=code)

        tablet.after.append(fail)
        with pytest.raises(Retryable, match="may have been done") as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        tablet.leader = 0
        assert await table.get(1, ["id"]) == {"id": 1}


@pytest.mark.parametrize(
    "code",
    [
        Code.CLOCK_AHEAD,
        Code.DIGEST_MISMATCH,
        Code.INVALID_ARGUMENT,
        Code.SCHEMA_MISMATCH,
        Code.TOO_OLD,
        Code.UNSUPPORTED_VERSION,
    ],
    ids=lambda code: code.name,
)
async def test_a_refusal_says_nothing_of_the_attempt_before(tmp_path: Path, code: Code) -> None:
    """As of another leader, of another release perhaps; TOO_OLD by itself says that it may have been done."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        await table.put({"id": 0})
        tablet.after.append(lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE))
        tablet.before.extend([lambda: None, lambda: Rejected("refused", code=code)])
        with pytest.raises(SteleError) as caught:
            await table.put({"id": 1})
        assert caught.value.code is (Code.TOO_OLD if code is Code.TOO_OLD else Code.UNKNOWN_OUTCOME)
        assert "nothing was done" not in str(caught.value)


async def test_a_write_that_no_node_was_sent_was_not_done(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=3.0) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        for node in cluster.nodes:
            await node.stop()
        with pytest.raises(Retryable, match="nothing was done") as caught:
            await table.put({"id": 1})
        assert caught.value.code is Code.NO_QUORUM


async def test_a_request_that_fails_within_nodes_is_not_sent_for_ever(tmp_path: Path) -> None:
    async with one_tablet(tmp_path, timeout_s=60) as (_, table, tablet):
        tablet.before.extend([lambda: Retryable("a fault", code=Code.INTERNAL)] * 1_000)
        async with asyncio.timeout(60):
            with pytest.raises(SteleError):
                await table.put({"id": 1})
        assert len(tablet.attempts) == 3


def test_a_client_id_is_new_long_before_a_node_forgets_the_old_one() -> None:
    """A write under an id that a node has forgotten is refused, and may have been done. Neither may import the other."""
    assert 2 * int(CLIENT_ID_IDLE_S * 1_000_000) <= IDLE_US


async def test_a_client_id_lasts_while_writes_under_it_are_under_way_and_not_for_long_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers under two ids at once would tell the node that an unfinished one is finished; an old id it forgets."""
    monkeypatch.setattr("stele.client.sequencer.CLIENT_ID_IDLE_S", 0.0)
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        cluster.nodes[0].delay_s = 1.0
        first = asyncio.ensure_future(table.write_arrow(pa.table({"id": [1]})))
        await cluster.nodes[0].came.wait()
        await table.put({"id": 2})
        await first
        cluster.nodes[0].delay_s = 0.0
        assert [(a.sequence, a.lowest_unfinished) for a in tablet.attempts] == [(1, 1), (2, 1)]
        assert len({a.client_id for a in tablet.attempts}) == 1
        await asyncio.sleep(0.01)
        await table.put({"id": 3})
        assert (tablet.attempts[-1].sequence, len({a.client_id for a in tablet.attempts})) == (1, 2)


async def test_a_block_that_waited_for_a_connection_is_not_sent_once_it_was_given_up(tmp_path: Path) -> None:
    """Its writer was told that nothing was done, and may have written something else since."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        cluster.nodes[0].speaks.clear()  # it does not even open a stream
        with pytest.raises(Retryable, match=r"did not answer within 0\.2 s; nothing was done") as caught:
            await table.write_arrow(pa.table({"id": [1]}), timeout_s=0.2)
        assert caught.value.code is Code.NO_QUORUM
        later = asyncio.ensure_future(table.write_arrow(pa.table({"id": [2]}), timeout_s=60))
        await asyncio.sleep(0)
        cluster.nodes[0].speaks.set()
        await later
        assert len({request.sequence for request in tablet.attempts}) == 1
        assert (await table.scan(["id"]).to_table())["id"].to_pylist() == [2]


async def test_a_client_id_that_a_tablet_has_forgotten_is_not_used_again(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        await table.put({"id": 1})
        tablet.before.append(lambda: Rejected("forgotten", code=Code.TOO_OLD))
        with pytest.raises(Retryable, match="forgotten this client id") as caught:
            await table.put({"id": 2})
        assert caught.value.code is Code.NO_QUORUM
        await table.put({"id": 2})
        before, _, after = tablet.attempts
        assert after.client_id != before.client_id and after.sequence == 1

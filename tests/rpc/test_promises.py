"""Promises that one line of the rpc layer keeps, each asked for by itself: budgets, and keys of streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stele.model.errors import Code, InvariantViolation, Rejected, Retryable
from stele.rpc import listener as listening
from stele.rpc.budget import ByteBudget
from stele.rpc.listener import StreamListener


def test_incomplete_messages_of_clients_count_and_peers_get_through() -> None:
    budget = ByteBudget(100, 20)
    budget.arrives(60)
    budget.take(15)
    with pytest.raises(Retryable) as full:
        budget.take(10)
    assert full.value.code is Code.THROTTLED
    budget.take(10, control=True)
    budget.arrives(-60)
    budget.take(10)


def test_bytes_that_nobody_took_are_not_given_back() -> None:
    budget = ByteBudget(100, 20)
    charge = budget.charge(10)
    charge.release()
    charge.release()
    with pytest.raises(InvariantViolation, match="more than was taken"):
        budget.give_back(1)


class Connection:
    """A connection from outside; who closed it, and why."""

    source = "somewhere"

    def __init__(self) -> None:
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ended: list[Exception | None] = []

    def close(self, error: Exception | None = None) -> None:
        self.ended.append(error)
        if not self.lost.done():
            self.lost.set_result(None)

    async def closed(self) -> None:
        await self.lost


def listener() -> StreamListener:
    made = StreamListener()
    made.port = 1
    return made


def ignore(connection: Any) -> None: ...


async def test_a_key_is_good_once_and_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = listener()
    key = one.expect(ignore)
    one.show(Connection(), key)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="did not begin with a key"):
        one.show(Connection(), key)  # type: ignore[arg-type]
    monkeypatch.setattr(listening, "_KEY_TIMEOUT_S", 0.0)
    key = one.expect(ignore)
    with pytest.raises(Rejected, match="did not begin with a key"):
        one.show(Connection(), key)  # type: ignore[arg-type]


async def test_keys_are_left_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_KEYS_MAX", 4)
    monkeypatch.setattr(listening, "_KEYS_FOR_PEERS", 2)
    one = listener()
    for peer in (False, False, True, True):
        one.expect(ignore, peer=peer)
        assert len(one._keys) <= 4
    for peer in (False, True):
        with pytest.raises(Retryable) as full:
            one.expect(ignore, peer=peer)
        assert full.value.code is Code.THROTTLED
    other = listener()
    for _ in range(2):
        other.expect(ignore)
    with pytest.raises(Retryable):
        other.expect(ignore)
    other.expect(ignore, peer=True)


async def test_a_connection_that_shows_no_key_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_KEY_TIMEOUT_S", 0.01)
    connection = Connection()
    listener().came(connection)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await connection.closed()
    assert "no key came in time" in str(connection.ended[0])


async def test_connections_that_have_shown_no_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_STRANGERS_MAX", 2)
    one = listener()
    connections = [Connection() for _ in range(3)]
    for connection in connections:
        one.came(connection)  # type: ignore[arg-type]
    assert [bool(c.ended) for c in connections] == [True, False, False]
    await one.close()


async def test_nothing_is_accepted_after_a_close() -> None:
    one = listener()
    await one.close()
    connection = Connection()
    one.came(connection)  # type: ignore[arg-type]
    assert connection.ended == [None]

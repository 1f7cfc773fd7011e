"""Places for streams: shared out to callers, and given up by readers that take nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow.flight as fl
import pytest

from stele.rpc import places as sharing
from stele.rpc.flight import FlightServer
from stele.rpc.places import Place, Places
from tests.rpc.test_flight import CLUSTER, ticket
from tests.rpc.test_stalled_reader import Endless, until_served


def taken(places: Places, source: str, count: int) -> list[Place]:
    found = [places.take(source) for _ in range(count)]
    return [place for place in found if place is not None]


def test_one_caller_leaves_places_to_others_and_has_all_it_may_alone() -> None:
    places = Places(32)
    many = taken(places, "greedy", 100)
    assert len(many) == 24
    few = taken(places, "modest", 100)
    assert len(few) == 8
    assert not taken(places, "late", 1)
    many.pop().release()
    assert not taken(places, "greedy", 1)
    assert len(taken(places, "late", 1)) == 1
    assert len(taken(Places(2), "alone", 3)) == 2


def test_who_takes_nothing_gives_way_to_who_has_less(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("stele.rpc.places.time.monotonic", lambda: now_s)
    places = Places(4)
    held = [*taken(places, "greedy", 3), *taken(places, "modest", 1)]
    assert len(held) == 4

    def may_end(place: Place) -> None:
        place.give_way = place.release

    for number, place in enumerate(held):
        may_end(place)
        place.idle_since_s = now_s - number / 10  # the modest one longest
    now_s += sharing.YIELD_S
    late = places.take("late")
    assert late is not None and held[2]._places is None and held[3]._places is places
    assert places.take("late") is not None and held[1]._places is None
    assert places.take("late") is None  # it has as many as the others
    assert places.take("modest") is not None and held[3]._places is None  # its own, which takes nothing
    assert places.take("modest") is None
    late.release()
    late.release()
    assert places.take("modest") is not None


@pytest.fixture
def server() -> Iterator[tuple[FlightServer, fl.FlightClient]]:
    provider = Endless()
    made = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, scans_max=2)
    client = fl.connect(f"grpc+tcp://127.0.0.1:{made.port}")
    try:
        yield made, client
    finally:
        client.close()
        made.close()


def test_readers_that_stall_hold_nobody_up_for_a_minute(server: tuple[FlightServer, fl.FlightClient]) -> None:
    """100 of them had all the places of a node, and nobody else could scan it for 60 s."""
    _, client = server
    stuck = [until_served(client, ticket()) for _ in range(2)]
    began_s = time.monotonic()
    try:
        until_served(client, ticket()).cancel()
    finally:
        for reader in stuck:
            reader.cancel()
    assert time.monotonic() - began_s < 30

"""The lease: whoever cannot renew it is dead before another may take it. On a clock that moves when nothing else is to be done."""

from __future__ import annotations

import asyncio
import copy
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import pytest

from stele_operator.kube import KubeError
from stele_operator.lease import DURATION_S, Lease

Json = dict[str, Any]
LIMIT_S = DURATION_S * 2 / 3


class Dead(BaseException):
    """What ends the process."""


class Time(selectors.DefaultSelector):
    """Time of an event loop that sleeps for nothing: what it would wait for has come at once. Seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.now_s += max(timeout, 0)
        return super().select(0)


class Server:
    """The Kubernetes port: one Lease. `fault`: what becomes of requests."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.there: Json | None = None
        self.changed_s = 0.0
        self.fault = ""

    async def _answer(self) -> None:
        match self.fault:
            case "silent":
                await asyncio.sleep(3_600)
            case "no credentials":
                raise RuntimeError("the token file is empty")
            case "refuses":
                raise KubeError(500, "InternalError", "etcd has no leader")
        await asyncio.sleep(0.01)

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        await self._answer()
        return copy.deepcopy(self.there)

    async def create(self, kind: str, namespace: str, manifest: Json) -> Json:
        await self._answer()
        return self._write({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "1"}})

    async def patch(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        await self._answer()
        assert self.there is not None
        return self._write({**self.there, "spec": {**self.there["spec"], **patch["spec"]}})

    def _write(self, lease: Json) -> Json:
        self.there, self.changed_s = lease, self.time.now_s
        return lease

    @property
    def holder(self) -> str:
        assert self.there is not None
        return str(self.there["spec"]["holderIdentity"])


def die(why: str) -> NoReturn:
    raise Dead(why)


def play(story: Callable[[Server, Lease, Lease], Coroutine[Any, Any, None]]) -> None:
    """Run a story of a server and two operators' leases in its own time."""
    time = Time()
    with asyncio.Runner(loop_factory=lambda: _loop(time)) as runner:
        server = Server(time)
        one, two = (
            Lease(server, "default", name, die=die, clock=lambda: time.now_s)  # type: ignore[arg-type]
            for name in ("one", "two")
        )
        runner.run(story(server, one, two))


def _loop(time: Time) -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop(time)
    loop.time = lambda: time.now_s  # type: ignore[method-assign]
    return loop


async def ends(keeper: Awaitable[None], why: str) -> None:
    with pytest.raises(Dead, match=why):
        await keeper


@pytest.mark.parametrize("fault", ["silent", "no credentials", "refuses"])
def test_who_cannot_renew_ends_before_another_may_take_it(fault: str) -> None:
    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        keeper = asyncio.create_task(one.keep_for_ever())
        for _ in range(1_000):
            await asyncio.sleep(1)
            assert not keeper.done() and server.time.now_s - server.changed_s < DURATION_S / 2
        server.fault = fault
        await ends(keeper, "could not be renewed")
        assert server.time.now_s - server.changed_s <= LIMIT_S
        ended_s, server.fault = server.time.now_s, ""
        await two.acquire()
        assert server.holder == "two" and server.time.now_s - ended_s > DURATION_S - LIMIT_S

    play(story)


def test_a_failure_that_passes_in_time_costs_nothing() -> None:
    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        keeper = asyncio.create_task(one.keep_for_ever())
        for fault in ("silent", "no credentials", "refuses"):
            server.fault = fault
            await asyncio.sleep(LIMIT_S / 2)
            server.fault = ""
            await asyncio.sleep(LIMIT_S)
        assert not keeper.done() and server.time.now_s - server.changed_s < DURATION_S / 2
        keeper.cancel()

    play(story)


@pytest.mark.parametrize("taken", [False, True], ids=["nobody took it", "another took it"])
def test_who_stood_still_for_longer_than_the_lease_ends(taken: bool) -> None:
    """Its machine was halted: whether another took it meanwhile is not to be found out first."""

    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        keeper = asyncio.create_task(one.keep_for_ever())
        await asyncio.sleep(1)
        before = server.changed_s
        server.time.now_s += 2 * DURATION_S
        if taken:
            assert server.there is not None
            server.there["spec"]["holderIdentity"] = "two"
        await ends(keeper, "could not be renewed")
        assert server.changed_s == before

    play(story)


def test_a_holder_is_taken_for_dead_by_our_own_clock() -> None:
    """Neither by the time that it wrote, nor before it was silent for as long as it said."""

    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        assert server.there is not None
        server.there["spec"] |= {"leaseDurationSeconds": 100, "renewTime": "1970-01-01T00:00:00.000000Z"}
        waiting = asyncio.create_task(two.acquire())
        for written in ("1970-01-01T00:00:01.000000Z", "1969-12-31T23:59:59.000000Z"):
            await asyncio.sleep(90)
            assert not waiting.done()
            server.there["spec"]["renewTime"] = written
        begun_s = server.time.now_s
        await waiting
        assert server.holder == "two" and 100 < server.time.now_s - begun_s < 103

    play(story)


def test_who_sees_another_hold_it_ends() -> None:
    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        assert server.there is not None
        server.there["spec"]["holderIdentity"] = "two"
        await ends(one.keep_for_ever(), "another operator")

    play(story)


def test_what_is_let_go_is_taken_at_once() -> None:
    async def story(server: Server, one: Lease, two: Lease) -> None:
        await one.acquire()
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(5)
        begun_s = server.time.now_s
        await one.release()
        await waiting
        assert server.holder == "two" and server.time.now_s - begun_s < 2

    play(story)

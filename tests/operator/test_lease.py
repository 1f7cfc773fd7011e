"""The lease: whoever cannot renew it is dead before another may take it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn

import pytest

from stele_operator.lease import Lease

Json = dict[str, Any]
DURATION_S = 3


class Dead(BaseException):
    """What ends the process."""


class Server:
    """The Kubernetes port: one Lease. `fault`: what becomes of requests."""

    def __init__(self) -> None:
        self.there: Json | None = None
        self.changed = 0.0
        self.fault = ""

    async def _answer(self) -> None:
        match self.fault:
            case "silent":
                await asyncio.Event().wait()
            case "no credentials":
                raise RuntimeError("the token file is empty")

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        await self._answer()
        return self.there

    async def create(self, kind: str, namespace: str, manifest: Json) -> Json:
        await self._answer()
        return self._write({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "1"}})

    async def patch(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        await self._answer()
        assert self.there is not None
        return self._write({**self.there, "spec": {**self.there["spec"], **patch["spec"]}})

    def _write(self, lease: Json) -> Json:
        self.there, self.changed = lease, time.monotonic()
        return lease


class Stood:
    """For how long this machine, or its event loop, has stood still."""

    def __init__(self) -> None:
        self.still_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.02)
            self.still_s += time.monotonic() - begun - 0.02

    def end(self) -> None:
        self._task.cancel()


def die(why: str) -> NoReturn:
    raise Dead(why)


@pytest.mark.parametrize("fault", ["silent", "no credentials"])
async def test_who_cannot_renew_ends_before_another_may_take_it(fault: str) -> None:
    stood = Stood()
    while True:
        server = Server()
        lease = Lease(server, "default", "one", duration_s=DURATION_S, die=die)  # type: ignore[arg-type]
        await lease.acquire()
        keeper, before = asyncio.create_task(lease.keep_for_ever()), stood.still_s
        await asyncio.sleep(1.1 * DURATION_S)
        if stood.still_s - before < DURATION_S / 6:
            break  # else this machine stood still for so long that it may have been in time no more
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    assert not keeper.done() and time.monotonic() - server.changed < DURATION_S / 2
    server.fault, before = fault, stood.still_s
    with pytest.raises(Dead, match="could not be renewed"):
        await asyncio.wait_for(keeper, 60)
    still_s = stood.still_s - before
    assert time.monotonic() - server.changed <= DURATION_S * 2 / 3 + 0.2 + still_s
    stood.end()


async def test_who_sees_another_hold_it_ends() -> None:
    server = Server()
    lease = Lease(server, "default", "one", duration_s=12, die=die)  # type: ignore[arg-type]
    await lease.acquire()
    assert server.there is not None
    server.there["spec"]["holderIdentity"] = "two"
    with pytest.raises(Dead, match="another operator"):
        await asyncio.wait_for(lease.keep_for_ever(), 60)

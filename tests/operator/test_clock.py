"""Times that Kubernetes writes down are compared with Kubernetes' own clock, not with the operator's machine's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from stele_operator.kube import Kube
from stele_operator.observe import observe_kubernetes

THEN_S = 1_000_000_000
RAW = {
    "metadata": {"namespace": "default", "name": "flights", "uid": "u", "creationTimestamp": None},
    "spec": {},
}


@contextlib.asynccontextmanager
async def server(date: str) -> AsyncIterator[Kube]:
    """An API server without objects, whose clock stands; and a connection to it."""

    async def answer(request: web.Request) -> web.Response:
        headers = {"Date": date}
        if request.path.endswith("flights-identity"):
            body = {"message": "not found", "details": {"name": "flights-identity"}}
            return web.json_response(body, status=404, headers=headers)
        return web.json_response({"items": []}, headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    settings = Configuration()
    settings.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kube = Kube(settings)
    try:
        yield kube
    finally:
        await kube.close()
        await runner.cleanup()


async def test_a_pass_goes_by_the_clock_of_the_api_server() -> None:
    """A machine whose clock was a day ahead deleted claims as it let them go: `keepFor` was over."""
    async with server("Sun, 09 Sep 2001 01:46:40 GMT") as kube:
        o, _ = await observe_kubernetes(kube, RAW, "image")
        assert THEN_S <= o.now_s < THEN_S + 600


async def test_a_date_that_is_none_is_not_gone_by() -> None:
    async with server("soon") as kube:
        o, _ = await observe_kubernetes(kube, RAW, "image")
        assert o.now_s > THEN_S + 600

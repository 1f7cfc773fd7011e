"""The whole operator: connection, lease, probes, sweep, watches. Called by the command line.

Owns the order in which these start and stop. Invariant: nothing acts before the lease is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import kopf
import structlog

from stele.rpc.http import HttpServer, Reply, Route, metrics_route
from stele_operator import metrics
from stele_operator.errands import Errands
from stele_operator.fleet import Fleet
from stele_operator.handlers import registry, settings
from stele_operator.kube import BadKubeconfig, Kube, KubeError, configuration, in_cluster
from stele_operator.lease import Lease
from stele_operator.report import Reporter

log = structlog.get_logger("stele.operator")
_AGAIN_S = 2.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a process. `namespaces`: empty for all namespaces. `metrics_port`: 0 for any free port."""

    image: str
    identity: str
    kubeconfig: str = ""
    namespaces: tuple[str, ...] = ()
    lease_namespace: str = ""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 8080


async def run(options: Options) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        BadKubeconfig: the API server cannot be used as given. The message is one line that says what to do.
        Rejected: the metrics port is in use.
    """
    kube = Kube(await configuration(options.kubeconfig))
    waiting, told = asyncio.current_task(), False

    def end() -> None:
        nonlocal told
        told = True
        assert waiting is not None
        waiting.cancel()

    # Needed until kopf installs its own handler: SIGTERM does not end a container's first process by default.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        await serve(kube, options)
    except asyncio.CancelledError:
        if not told:
            raise
        log.info("stopped before it had the lease")
    finally:
        await kube.close()


async def serve(kube: Kube, options: Options) -> None:
    """Run over a connection. Probes are answered from the start, so that the kubelet does not kill a process
    that waits for the API server.

    Raises:
        BadKubeconfig, Rejected: as `run`.
    """
    prepare_interpreter()
    reporter = Reporter(kube, options.identity)
    fleet = Fleet(kube, reporter, options.namespaces, options.image)
    errands = Errands(kube, reporter, options.namespaces, options.image, fleet.link)
    introduced = asyncio.Event()
    server = HttpServer(_routes(fleet, introduced), option="--metrics-port")
    port = await server.start(options.metrics_host, options.metrics_port)
    try:
        await _introduce(kube, options)
        introduced.set()
        log.info("serving probes and metrics", host=options.metrics_host, port=port)
        await _lead(kube, fleet, errands, options)
    finally:
        await server.close()


def prepare_interpreter() -> None:
    """Tune the interpreter: threads give way to the event loop after 1 ms, and the garbage collector skips
    what is loaded by now.

    A garbage collection stops all threads. A collection of the youngest generation takes 1 ms; a full one
    takes 50 ms with a view of ten thousand tablets. So young collections are frequent, and every other one
    collects both young generations. Full collections are very rare, because hardly any long-lived object is
    in a cycle.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(400, 0, 100_000)


async def _introduce(kube: Kube, options: Options) -> None:
    """Wait for the CustomResourceDefinitions, and in a pod for the API server too.

    Outside a pod an unusable API server is an error at once. In a pod the process waits: if it ended, the
    kubelet could restart it up to five minutes late.
    """
    told = ""
    while True:
        try:
            if await kube.serves_our_resources():
                return
            why = "the CustomResourceDefinitions are missing; the operator waits until they are created: kubectl apply -f crds/"
        except KubeError as exc:
            if not in_cluster(options.kubeconfig):
                raise _unusable(kube, options, exc) from exc
            why = f"the API server does not answer, waiting for it: {exc}"
        if why != told:
            log.warning(why)
            told = why
        await asyncio.sleep(_AGAIN_S)


def _unusable(kube: Kube, options: Options, exc: KubeError) -> BadKubeconfig:
    given = f"kubeconfig {options.kubeconfig}" if options.kubeconfig else "the kubeconfig in use"
    advice = "check its server and credentials, or give another with --kubeconfig"
    return BadKubeconfig(f"the API server {kube.settings.host} cannot be used ({exc}); {given}: {advice}")


async def _lead(kube: Kube, fleet: Fleet, errands: Errands, options: Options) -> None:
    lease = Lease(kube, options.lease_namespace or _own_namespace(options), options.identity)
    await lease.acquire()
    fleet.lead()
    keepers = [
        asyncio.create_task(lease.keep_for_ever(), name="lease"),
        asyncio.create_task(fleet.sweep_for_ever(), name="sweep"),
        asyncio.create_task(errands.run_for_ever(), name="errands"),
    ]
    try:
        watching = registry(fleet, errands, lambda: configuration(options.kubeconfig))
        await kopf.operator(
            registry=watching,
            settings=settings(),
            standalone=True,
            clusterwide=not options.namespaces,
            namespaces=options.namespaces,
        )
    finally:
        await fleet.close()
        for keeper in keepers:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await lease.release()


def _own_namespace(options: Options) -> str:
    if _OWN_NAMESPACE.is_file():
        return _OWN_NAMESPACE.read_text().strip()
    return options.namespaces[0] if options.namespaces else "default"


def _routes(fleet: Fleet, introduced: asyncio.Event) -> dict[str, Route]:
    async def live() -> Reply:
        why = fleet.not_live()
        return Reply(503 if why else 200, (why or "ok").encode() + b"\n")

    async def ready() -> Reply:
        if introduced.is_set():
            return await live()
        return Reply(503, b"waits for the API server and the CustomResourceDefinitions\n")

    return {"/livez": live, "/readyz": ready, "/metrics": metrics_route(metrics.registry)}

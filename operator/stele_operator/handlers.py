"""The handlers of kopf's watches. They only wake cluster tasks. Made by app.

There are only event handlers, so kopf writes no annotation and no finalizer. So no deletion hangs while the
operator is away. Invariant: a handler returns at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from stele_operator.api import GROUP, VERSION
from stele_operator.errands import Errands
from stele_operator.fleet import Fleet
from stele_operator.plan.naming import LABEL_CLUSTER, LABEL_ERRAND


class _Patience:
    """The pauses, in seconds, between kopf's tries of one request. They never end.

    If they ended, one refused watch (403) would end kopf, and with it the operator for all namespaces. So the
    watches of a deleted namespace wait until it exists again.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 5.0, 10.0, 20.0), itertools.repeat(60.0))


def settings() -> kopf.OperatorSettings:
    """Settings that make kopf do nothing but watch."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.peering.standalone = True
    made.networking.error_backoffs = _Patience()
    made.watching.connect_timeout = 10
    # A watch is opened again after this time. The sweep finds what it missed.
    made.watching.server_timeout = 240
    for resource in ("pods", "persistentvolumeclaims"):
        made.watching.label_selectors["", "v1", resource] = LABEL_CLUSTER
    made.watching.label_selectors["batch", "v1", "jobs"] = LABEL_ERRAND
    return made


def connection(found: Configuration) -> kopf.ConnectionInfo:
    """The credentials of our own client, in kopf's form."""
    header = str((found.api_key or {}).get("BearerToken") or (found.api_key or {}).get("authorization") or "")
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert or None,
        insecure=not found.verify_ssl,
        username=found.username or None,
        password=found.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=found.cert_file or None,
        private_key_path=found.key_file or None,
    )


def registry(fleet: Fleet, errands: Errands, login: Any) -> kopf.OperatorRegistry:
    """The handlers. `login` is a coroutine function that returns fresh credentials, because tokens expire."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def on_login(**_: Any) -> kopf.ConnectionInfo:
        return connection(await login())

    @kopf.on.cleanup(registry=made)
    async def on_cleanup(**_: Any) -> None:
        await fleet.close()

    @kopf.on.event(GROUP, VERSION, "tabletclusters", registry=made)
    @kopf.on.event(GROUP, VERSION, "tabletgroups", registry=made)
    async def on_resource(body: kopf.Body, type: str | None, **_: Any) -> None:
        fleet.saw(dict(body), deleted=type == "DELETED")

    @kopf.on.event(GROUP, VERSION, "tabletbackups", registry=made)
    @kopf.on.event(GROUP, VERSION, "tabletbackupschedules", registry=made)
    @kopf.on.event(GROUP, VERSION, "tabletrestores", registry=made)
    @kopf.on.event("batch", "v1", "jobs", labels={LABEL_ERRAND: kopf.PRESENT}, registry=made)
    async def on_errand(**_: Any) -> None:
        errands.wake()

    @kopf.on.event("", "v1", "pods", labels={LABEL_CLUSTER: kopf.PRESENT}, registry=made)
    @kopf.on.event("", "v1", "persistentvolumeclaims", labels={LABEL_CLUSTER: kopf.PRESENT}, registry=made)
    async def on_part(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        fleet.wake(namespace or "", labels[LABEL_CLUSTER])

    return made

"""The DNS names of the cluster: services, and pods of headless services. Owns the hosts file that `names/`
reads.

The name of a service resolves to its pods' addresses, because services have no addresses of their own here.
So clients must use target ports.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stele_local.controllers import is_ready
from stele_local.kinds import POD, SERVICE
from stele_local.objects import find
from stele_local.registry import Registry

Json = dict[str, Any]
SHIM = Path(__file__).parent / "names"
DOMAIN = "svc.cluster.local"


def names(registry: Registry) -> dict[str, list[str]]:
    """Every name with its addresses, as cluster DNS would resolve it."""
    known: dict[str, list[str]] = {}
    for service in registry.store.objects(SERVICE.key):
        spec, namespace, name = service["spec"], service["metadata"]["namespace"], service["metadata"]["name"]
        if not spec.get("selector"):
            continue
        listed: list[str] = []
        for pod in registry.store.objects(POD.key, namespace):
            labels = pod["metadata"].get("labels") or {}
            address = find(pod, "status", "podIP")
            if not address or any(labels.get(k) != v for k, v in spec["selector"].items()):
                continue
            if find(pod, "status", "phase") in ("Succeeded", "Failed"):
                continue
            if not spec.get("publishNotReadyAddresses") and not (
                is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
            ):
                continue
            listed.append(address)
            if pod["spec"].get("subdomain") == name:
                host = pod["spec"].get("hostname") or pod["metadata"]["name"]
                known[f"{host}.{name}.{namespace}.{DOMAIN}"] = [address]
        if listed:
            known[f"{name}.{namespace}.{DOMAIN}"] = listed
    return known


class HostsFile:
    """The hosts file. It is replaced atomically, and only if it changes."""

    def __init__(self, registry: Registry, path: Path) -> None:
        self._registry, self.path = registry, path
        self._written: dict[str, list[str]] | None = None

    def write(self) -> None:
        current = names(self._registry)
        if current == self._written:
            return
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(current))
        os.replace(temporary, self.path)
        self._written = current

    def environment(self, namespace: str) -> dict[str, str]:
        """Environment variables with which a process can resolve these names."""
        return {"STELE_LOCAL_HOSTS": str(self.path), "STELE_LOCAL_NAMESPACE": namespace}

"""Which names the cluster knows: pods of headless services, and services. Owns the hosts file that `names/` reads.

Names of a service answer its pods' addresses themselves (there are no virtual ones), so a port must be a target port."""

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
    """Every name with its addresses, as cluster DNS would answer."""
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
    """The file, replaced as a whole, and only when it changes."""

    def __init__(self, registry: Registry, path: Path) -> None:
        self._registry, self.path = registry, path
        self._written: dict[str, list[str]] | None = None

    def write(self) -> None:
        current = names(self._registry)
        if current == self._written:
            return
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(current))
        os.replace(aside, self.path)
        self._written = current

    def environment(self, namespace: str) -> dict[str, str]:
        """What a process needs to see these names."""
        return {"STELE_LOCAL_HOSTS": str(self.path), "STELE_LOCAL_NAMESPACE": namespace}

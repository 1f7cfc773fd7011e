"""What the demo asks of Kubernetes: apply a file, read a custom resource, follow events. Works on any cluster.

Called by __main__.py and narrator.py; keeps no state but the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

GROUP = "stele.dev"
VERSION = "v1alpha1"
PLURALS = {"TabletCluster": "tabletclusters", "TabletGroup": "tabletgroups"}


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event as the demo shows it. `key` tells one occurrence from the next."""

    key: tuple[str, int]
    kind: str
    name: str
    reason: str
    message: str
    warning: bool


class Kube:
    """A connection to one API server and namespace."""

    def __init__(self, reach: Any, namespace: str) -> None:
        """`reach`: the path of a kubeconfig, or a client that is connected already."""
        self.namespace = namespace
        given = isinstance(reach, Path)
        api = config.new_client_from_config(str(reach)) if given else reach  # type: ignore[no-untyped-call]
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._extensions = client.ApiextensionsV1Api(api)

    def apply_crds(self, folder: Path) -> None:
        """Create the CRDs of `folder`, or update those that are there."""
        for path in sorted(folder.glob("*.yaml")):
            for body in yaml.safe_load_all(path.read_text()):
                try:
                    self._extensions.create_custom_resource_definition(body)
                except ApiException as exc:
                    if exc.status != 409:
                        raise
                    self._extensions.patch_custom_resource_definition(body["metadata"]["name"], body)

    def apply(self, path: Path) -> list[tuple[str, str]]:
        """Create or update every custom resource of a YAML file; returns (kind, name) of each."""
        applied = []
        for body in yaml.safe_load_all(path.read_text()):
            kind, name = body["kind"], body["metadata"]["name"]
            body["metadata"]["namespace"] = self.namespace
            where = (GROUP, VERSION, self.namespace, PLURALS[kind])
            try:
                self._custom.create_namespaced_custom_object(*where, body)
            except ApiException as exc:
                if exc.status != 409:
                    raise
                self._custom.patch_namespaced_custom_object(*where, name, body)
            applied.append((kind, name))
        return applied

    def status(self, kind: str, name: str) -> dict[str, Any]:
        """The status of a custom resource; empty before the operator wrote one."""
        got: Any = self._custom.get_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURALS[kind], name
        )
        status: dict[str, Any] = got.get("status") or {}
        return status

    def pods(self, selector: str) -> list[Any]:
        """Pods that match a label selector."""
        found: list[Any] = self._core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return found

    def events(self) -> list[EventLine]:
        """All events of the namespace about Stele's resources, oldest first."""
        items = self._core.list_namespaced_event(self.namespace).items
        lines = [
            (
                int(e.metadata.resource_version or 0),  # finer than the seconds of an event's time
                EventLine(
                    key=(str(e.metadata.uid), e.count or 1),
                    kind=e.involved_object.kind,
                    name=e.involved_object.name or "",
                    reason=e.reason or "",
                    message=e.message or "",
                    warning=e.type == "Warning",
                ),
            )
            for e in items
            if e.involved_object.kind in PLURALS
        ]
        return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """The condition of type `kind`, or one of status Unknown."""
    for one in status.get("conditions", ()):
        if one["type"] == kind:
            found: dict[str, Any] = one
            return found
    return {"type": kind, "status": "Unknown", "reason": "NotReported", "message": ""}

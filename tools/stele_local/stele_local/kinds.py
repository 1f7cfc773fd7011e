"""The kinds that are served. Owns: the table of built-in kinds, and the conversion of a
CustomResourceDefinition to a `Kind`.

Holds no objects. Invariant: a `Kind` has all that the generic code needs. Only `builtin` and the controllers
look at kinds by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a kubectl table; `path` is the JSONPath of an additionalPrinterColumn."""

    name: str
    type: str
    path: str
    priority: int = 0
    format: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One served kind. `schema`: None for built-in kinds, whose fields are not pruned here."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    status: bool = False
    generation: bool = False
    scale: Mapping[str, str] | None = None
    schema: Mapping[str, Any] | None = None
    columns: tuple[Column, ...] | None = None
    selectable: tuple[str, ...] = ()  # field selectors beside metadata.name and metadata.namespace
    returns_deleted: bool = False  # DELETE answers the object instead of a Status
    preferred: bool = True
    rules: Any = field(default=None, compare=False)  # compiled CEL (cel.Rules)

    @property
    def key(self) -> tuple[str, str]:
        """The key of the table with its objects. It is the same for all versions of the kind."""
        return (self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        return self.schema is not None


def _kind(group: str, plural: str, kind: str, short: str = "", **more: Any) -> Kind:
    return Kind(
        group,
        "v1",
        plural,
        kind,
        singular=kind.lower(),
        short_names=tuple(short.split()) if short else (),
        **more,
    )


_INVOLVED = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENT_FIELDS = (
    *(f"involvedObject.{part}" for part in _INVOLVED),
    "reason",
    "type",
    "source",
    "reportingComponent",
)

BUILT_IN: tuple[Kind, ...] = (
    _kind("", "namespaces", "Namespace", "ns", namespaced=False, status=True, selectable=("status.phase",), returns_deleted=True),
    _kind("", "nodes", "Node", "no", namespaced=False, status=True, selectable=("spec.unschedulable",)),
    _kind("", "persistentvolumes", "PersistentVolume", "pv", namespaced=False, status=True, returns_deleted=True),
    _kind("", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc", status=True, returns_deleted=True),
    _kind(
        "", "pods", "Pod", "po", status=True, generation=True, categories=("all",), returns_deleted=True,
        selectable=("spec.nodeName", "status.phase", "spec.restartPolicy", "status.podIP"),
    ),
    _kind("", "services", "Service", "svc", status=True, categories=("all",), returns_deleted=True),
    _kind("", "configmaps", "ConfigMap", "cm"),
    _kind("", "secrets", "Secret", selectable=("type",)),
    _kind("", "events", "Event", "ev", selectable=_EVENT_FIELDS),
    _kind("coordination.k8s.io", "leases", "Lease"),
    _kind("batch", "jobs", "Job", status=True, generation=True, categories=("all",), selectable=("status.successful",)),
    _kind("policy", "poddisruptionbudgets", "PodDisruptionBudget", "pdb", status=True, generation=True),
    _kind(
        "apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", "crd crds", namespaced=False,
        status=True, generation=True, categories=("api-extensions",),
    ),
)  # fmt: skip

CRD = next(kind for kind in BUILT_IN if kind.plural == "customresourcedefinitions")
NAMESPACE = next(kind for kind in BUILT_IN if kind.plural == "namespaces")
NODE = next(kind for kind in BUILT_IN if kind.plural == "nodes")
PV = next(kind for kind in BUILT_IN if kind.plural == "persistentvolumes")
PVC = next(kind for kind in BUILT_IN if kind.plural == "persistentvolumeclaims")
POD = next(kind for kind in BUILT_IN if kind.plural == "pods")
SERVICE = next(kind for kind in BUILT_IN if kind.plural == "services")
CONFIG_MAP = next(kind for kind in BUILT_IN if kind.plural == "configmaps")
SECRET = next(kind for kind in BUILT_IN if kind.plural == "secrets")
JOB = next(kind for kind in BUILT_IN if kind.plural == "jobs")
EVENT = next(kind for kind in BUILT_IN if kind.plural == "events")


def from_crd(crd: Json) -> list[Kind]:
    """A kind for each served version of a definition, the storage version first."""
    spec, names = crd["spec"], crd["spec"]["names"]
    kinds = []
    for version in sorted(spec["versions"], key=lambda v: not v.get("storage")):
        if not version.get("served"):
            continue
        sub = version.get("subresources") or {}
        columns = version.get("additionalPrinterColumns")
        kinds.append(
            Kind(
                group=spec["group"],
                version=version["name"],
                plural=names["plural"],
                kind=names["kind"],
                namespaced=spec["scope"] == "Namespaced",
                singular=names.get("singular") or names["kind"].lower(),
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                status="status" in sub,
                generation=True,
                scale=sub.get("scale"),
                schema=version["schema"]["openAPIV3Schema"],
                columns=tuple(
                    Column(c["name"], c["type"], c["jsonPath"], c.get("priority", 0), c.get("format", ""))
                    for c in columns
                )
                if columns
                else None,
                preferred=bool(version.get("storage")),
            )
        )
    return kinds

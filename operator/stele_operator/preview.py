"""Reads manifests, observes the cluster that they name, and foretells what they would do. Called by the
command line and by reconcile; changes nothing.

Invariants: all faults of a file are reported together. Nothing is guessed: an unknown field, another kind and
another cluster are faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pydantic

from stele import __version__
from stele.model.errors import Code, Rejected, Retryable
from stele.model.nearest import did_you_mean
from stele_operator import strict
from stele_operator.api import API_VERSION
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.fixed import fixed_faults
from stele_operator.api.group import TabletGroupSpec
from stele_operator.kube import Kube, KubeError
from stele_operator.masters import MasterLink
from stele_operator.observe import observe_kubernetes, observe_masters, observe_unlisted
from stele_operator.plan import naming
from stele_operator.plan.foretold import Foretold
from stele_operator.plan.observation import Catalog, GroupObject, Observation
from stele_operator.plan.rehearsal import foretell, never
from stele_operator.plan.rules import cluster_faults, group_faults
from stele_operator.report import difference

Json = dict[str, Any]
_KINDS = ("TabletCluster", "TabletGroup")
_PARTS = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = (
    *("annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
    *("generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"),
    *("resourceVersion", "selfLink", "uid"),
)
"""Fields of an object's metadata that `kubectl get -o yaml` prints."""
FILE_MAX = 1 << 20
_FAULTS_TOLD = 20
DEFAULT_IMAGE = f"stele/node:{__version__}"
"""The image of masters and nodes, if neither the spec nor the operator's settings name one."""


class BadManifest(Rejected):
    """A file of manifests is wrong. The message lists all its faults, at most 20."""

    def __init__(self, where: str, faults: Sequence[str]) -> None:
        told = list(faults[:_FAULTS_TOLD])
        if more := len(faults) - len(told):
            told.append(f"and {more} more")
        super().__init__(f"{where}: {'; '.join(told)}", code=Code.INVALID_ARGUMENT)
        self.faults = tuple(told)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The manifests of one cluster. `spec`: that of its TabletCluster; None if the file has none, so that the
    present spec stays. `raws`: the manifests as they are, by kind and name.
    """

    namespace: str
    cluster: str
    spec: TabletClusterSpec | None
    groups: dict[str, TabletGroupSpec]
    raws: dict[tuple[str, str], Json]


def read_manifests(text: str, where: str, namespace: str = "") -> Wanted:
    """The manifests in a file's text. `namespace`: the one that was asked for. "" means the namespace that
    the manifests name, or else `default`.

    Raises:
        BadManifest: the file has faults. The message lists them.
    """
    if len(text) > FILE_MAX:
        raise BadManifest(where, [f"it is longer than {FILE_MAX >> 20} MiB; give a file of one cluster"])
    try:
        documents = strict.documents(text)
    except strict.BadText as exc:
        raise BadManifest(where, [f"it is not YAML: {exc}"]) from exc
    if len(documents) == 1 and isinstance(documents[0], dict) and documents[0].get("kind") == "List":
        items = documents[0].get("items") or []
        if not isinstance(items, list):
            raise BadManifest(where, ["field items of a List must be a list of manifests"])
        documents = items
    faults: list[str] = []
    raws: dict[tuple[str, str], Json] = {}
    for number, document in enumerate(documents, 1):
        at = f"document {number}" if len(documents) > 1 else "it"
        if (named := _named(document, at, faults)) is None:
            continue
        if named in raws:
            faults.append(f"{named[0]} {named[1]} stands in the file twice; remove one")
        raws[named] = document
    if not documents:
        faults.append("it has no manifest; expected a TabletCluster or a TabletGroup")
    spaces = {str(raw["metadata"].get("namespace") or "") for raw in raws.values()} - {""}
    spaces |= {namespace} - {""}
    if len(spaces) > 1:
        faults.append(f"only one namespace is allowed, but these are named: {', '.join(sorted(spaces))}")
    specs = {named: _spec(named, raw, faults) for named, raw in raws.items()}
    groups = {n: s for (_, n), s in specs.items() if isinstance(s, TabletGroupSpec)}
    clusters = [name for kind, name in raws if kind == "TabletCluster"]
    if len(clusters) > 1:
        faults.append(
            f"it has more than one TabletCluster: {', '.join(clusters)}; give each a file of its own"
        )
    meant = set(clusters) or {g.clusterRef.name for g in groups.values()}
    faults += [
        f"TabletGroup {name} is of TabletCluster {g.clusterRef.name}, not of {clusters[0]}"
        for name, g in groups.items()
        if len(clusters) == 1 and g.clusterRef.name != clusters[0]
    ]
    if len(meant) > 1 and not clusters:
        faults.append(f"its TabletGroups are of more than one TabletCluster: {', '.join(sorted(meant))}")
    if faults:
        raise BadManifest(where, faults)
    spec = next((s for s in specs.values() if isinstance(s, TabletClusterSpec)), None)
    return Wanted(next(iter(spaces), "default"), meant.pop(), spec, groups, raws)


def _named(document: Any, at: str, faults: list[str]) -> tuple[str, str] | None:
    """Kind and name of a manifest. If it is unusable, None, and the fault is added to `faults`."""
    if not isinstance(document, dict):
        faults.append(f"{at} is not an object; expected a TabletCluster or a TabletGroup")
        return None
    kind, version = document.get("kind"), document.get("apiVersion")
    if kind not in _KINDS:
        faults.append(f"{at} is a {kind or 'document without kind'}; expected TabletCluster or TabletGroup")
        return None
    if version != API_VERSION:
        faults.append(f"{at} has apiVersion {version}; expected {API_VERSION}")
        return None
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(name, str) or not name:
        faults.append(f"{at} has no metadata.name")
        return None
    for known, part, at in ((_PARTS, document, ""), (_METADATA, metadata, "metadata.")):
        unknown = sorted(str(key) for key in part if key not in known)
        faults += [f"{kind} {name}: {at}{key} is unknown{did_you_mean(key, known)}" for key in unknown]
    return kind, name


def _spec(named: tuple[str, str], raw: Json, faults: list[str]) -> pydantic.BaseModel | None:
    kind, name = named
    spec, found = strict.spec_of(
        TabletClusterSpec if kind == "TabletCluster" else TabletGroupSpec, raw.get("spec")
    )
    faults += [f"{kind} {name}: {fault}" for fault in found]
    return spec


def changed(o: Observation, wanted: Wanted) -> Observation:
    """The observation with the wanted specs in place of the present ones. TabletGroups that do not exist are
    added.
    """
    there = {g.name: g for g in o.groups}
    groups = [
        replace(g, spec=wanted.groups[g.name], faults=(), unknown=()) if g.name in wanted.groups else g
        for g in o.groups
    ]
    groups += [
        GroupObject(name, f"new-{name}", "", 1, "9999", False, (), spec)
        for name, spec in wanted.groups.items()
        if name not in there
    ]
    cluster = o.cluster
    if wanted.spec is not None:
        cluster = replace(cluster, spec=wanted.spec, faults=(), unknown=())
    return replace(o, cluster=cluster, groups=tuple(groups))


def refusals(before: Observation, after: Observation, names: Sequence[str]) -> tuple[str, ...]:
    """Why the specs of `after` would not be accepted; empty if they would be. `names`: the TabletGroups in
    the manifests.
    """
    faults = list(cluster_faults(after))
    old, new = before.cluster.spec, after.cluster.spec
    if old is not None and new is not None:
        faults += fixed_faults(old, new)
    for name in names:
        group, was = after.group(name), before.group(name)
        if group is None or group.spec is None:
            continue
        found = list(group_faults(group.spec))
        if was is not None and was.spec is not None:
            found += fixed_faults(was.spec, group.spec)
        faults += [f"TabletGroup {name}: {fault}" for fault in found]
    return tuple(dict.fromkeys(faults))


def answer(o: Observation, wanted: Wanted, catalog: Catalog, stop: Callable[[], bool] = never) -> Foretold:
    """What the wanted specs would do to the observed cluster. `stop`: as in `foretell`."""
    after = changed(o, wanted)
    if faults := refusals(o, after, tuple(wanted.groups)):
        return Foretold(f"TabletCluster {o.cluster.namespace}/{o.cluster.name}", refused=faults)
    return foretell(o, after, catalog, stop)


async def preview(kube: Kube, wanted: Wanted, image: str = "", masters: Sequence[str] = ()) -> Foretold:
    """Foretell what the manifests would do. `image`: the operator's own setting. If it is "" and the present
    spec names no image, the image of the running pods is taken, else the operator's default. `masters`:
    addresses of masters; empty to take those of their pods.

    Raises:
        Rejected: there is no such TabletCluster.
        Retryable: it has not formed; or its masters do not answer, or have not heard from all nodes yet.
        KubeError: the API server refused or did not answer.
    """
    raw = await kube.get("TabletCluster", wanted.namespace, wanted.cluster)
    if raw is None:
        found = [o["metadata"]["name"] for o in await kube.list("TabletCluster", wanted.namespace)]
        hint = did_you_mean(wanted.cluster, found)
        raise Rejected(
            f"there is no TabletCluster {wanted.cluster} in namespace {wanted.namespace}, and a plan needs one that runs{hint}",
            code=Code.NOT_FOUND,
        )
    if not image and not (raw.get("spec") or {}).get("image"):
        image = await _image(kube, wanted)
    o, _ = await observe_kubernetes(kube, raw, image or DEFAULT_IMAGE)
    if o.identity is None or not o.identity.formed:
        raise Retryable(
            f"TabletCluster {wanted.cluster} has not formed yet; try again once it is Ready",
            code=Code.NOT_READY,
        )
    link = MasterLink(o.identity.cluster_id, "", o.identity.fork_id)
    try:
        catalog = await _catalog(link, o, masters)
        o = await observe_unlisted(kube, replace(o, catalog=catalog))
    finally:
        await link.close()
    after = changed(o, wanted)
    faults = refusals(o, after, tuple(wanted.groups)) or await _refused_by_server(kube, wanted)
    if faults:
        return Foretold(f"TabletCluster {wanted.namespace}/{wanted.cluster}", refused=faults)
    return foretell(o, after, catalog)


async def _catalog(link: MasterLink, o: Observation, masters: Sequence[str]) -> Catalog:
    if masters:
        link.learn(masters)
        catalog: Catalog | None = await link.catalog()
        problem = ""
    else:
        _, catalog, problem = await observe_masters(link, o)
    if catalog is None:
        raise Retryable(
            f"the masters of {o.cluster.name} do not answer here: {problem}. Inside Kubernetes they do: "
            "`kubectl exec -i deploy/RELEASE -- stele-operator plan -f -`. Elsewhere, name them with --masters",
            code=Code.NOT_READY,
        )
    if not catalog.view.settled:
        raise Retryable(
            "the leading master is new and has not heard from all nodes yet; try again in a second",
            code=Code.NOT_READY,
        )
    return await link.with_sizes(catalog)


async def _image(kube: Kube, wanted: Wanted) -> str:
    """The image that most running pods of the cluster have; "" if there are none."""
    pods = await kube.list("Pod", wanted.namespace, f"{naming.LABEL_CLUSTER}={wanted.cluster}")
    images = [str(c["image"]) for p in pods for c in p["spec"]["containers"] if c["name"] == naming.CONTAINER]
    return max(images, key=images.count, default="")


async def _refused_by_server(kube: Kube, wanted: Wanted) -> tuple[str, ...]:
    """Faults that the API server itself, with its rules and webhooks, finds in the manifests. It is asked by
    dry runs. Manifests for which the caller lacks the right to ask have no faults.
    """
    faults = []
    for (kind, name), raw in wanted.raws.items():
        spec = raw.get("spec") or {}
        try:
            there = await kube.get(kind, wanted.namespace, name)
            if there is None:
                body = {**raw, "metadata": {"name": name, "namespace": wanted.namespace}}
                await kube.create(kind, wanted.namespace, body, dry_run=True)
            elif patch := difference(there.get("spec") or {}, spec):
                await kube.patch(kind, wanted.namespace, name, {"spec": patch}, dry_run=True)
        except KubeError as exc:
            if exc.status in (401, 403, 405, 501):
                continue
            if not exc.status:
                raise
            faults.append(f"{kind} {name}: {exc}")
    return tuple(faults)

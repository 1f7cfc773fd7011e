"""Reads authoritative lists and parses them once. Called by reconcile; changes nothing.

Invariant: a missing answer raises; it never becomes an empty list. Two parts may be None, and the plan allows
for that: machines that the operator may not read, and the catalog while no master leads.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pydantic
import structlog

from stele.driver.view import NodeState
from stele.model.errors import SteleError
from stele.model.ids import is_id, new_id
from stele.model.jsons import parse_json, refuse_deep, whole_number
from stele.rpc.resolve import join_address
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec
from stele_operator.api.scalars import byte_count
from stele_operator.kube import Kube, KubeError
from stele_operator.masters import MasterLink
from stele_operator.plan import naming
from stele_operator.plan.moments import seconds_of as seconds_of
from stele_operator.plan.observation import (
    Catalog,
    Claim,
    ClusterObject,
    Condition,
    Existing,
    FirstMaster,
    GroupObject,
    Identity,
    Machine,
    MasterReport,
    Observation,
    Pod,
    Role,
    Taint,
)

log = structlog.get_logger("stele.operator.observe")
Json = dict[str, Any]
Spec = TypeVar("Spec", bound=pydantic.BaseModel)
_COUNT_MAX = (1 << 53) - 1
_FRESH_IDS = 128  # more than 1 cluster, 5 masters and 100 nodes


def faults_of(error: pydantic.ValidationError) -> tuple[str, ...]:
    """Every fault that a model found, each as `field: what is wrong`."""
    return tuple(f"spec.{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors())


def read_spec(model: type[Spec], raw: Json) -> tuple[Spec | None, tuple[str, ...], tuple[str, ...]]:
    """The spec, its faults, and its unknown fields. The spec is None if it breaks a rule; unknown fields are
    left out of it.

    The API server drops fields that its definitions lack. So unknown fields come from definitions newer than
    this operator, for example during an upgrade.
    """
    spec = raw.get("spec") or {}
    try:
        refuse_deep(spec)
    except ValueError as exc:
        return None, (f"spec: {exc}",), ()
    try:
        return model.model_validate(spec), (), ()
    except pydantic.ValidationError as exc:
        places = [e["loc"] for e in exc.errors() if e["type"] == "extra_forbidden"]
    spec = copy.deepcopy(spec)
    for *parents, name in places:
        part: Any = spec
        for step in parents:
            part = part[step]
        del part[name]
    unknown = tuple(dict.fromkeys(_path(place) for place in places))
    try:
        return model.model_validate(spec), (), unknown
    except pydantic.ValidationError as exc:
        return None, faults_of(exc), unknown


def _path(place: Sequence[str | int]) -> str:
    return "spec" + "".join("[]" if isinstance(step, int) else f".{step}" for step in place)


def parse_cluster(raw: Json) -> ClusterObject:
    """A TabletCluster as the API server gave it."""
    metadata = raw["metadata"]
    spec, faults, unknown = read_spec(TabletClusterSpec, raw)
    return ClusterObject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        faults=faults,
        unknown=unknown,
        conditions=_conditions(raw),
        question=str((metadata.get("annotations") or {}).get(naming.ANNOTATION_PLAN, "")),
    )


def parse_group(raw: Json) -> GroupObject:
    """A TabletGroup as the API server gave it."""
    metadata = raw["metadata"]
    spec, faults, unknown = read_spec(TabletGroupSpec, raw)
    return GroupObject(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=int(metadata.get("generation", 0)),
        created=str(metadata.get("creationTimestamp", "")),
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(metadata.get("finalizers") or ()),
        spec=spec,
        faults=faults,
        unknown=unknown,
        conditions=_conditions(raw),
        recorded_table=str((raw.get("status") or {}).get("tableID", "")),
        recorded_cluster=str((raw.get("status") or {}).get("clusterUUID", "")),
    )


def _conditions(raw: Json) -> tuple[Condition, ...]:
    return tuple(
        Condition(
            c["type"],
            c["status"],
            c.get("reason", ""),
            c.get("message", ""),
            c.get("lastTransitionTime", ""),
            int(c.get("observedGeneration", 0)),
        )
        for c in (raw.get("status") or {}).get("conditions") or ()
    )


def parse_identity(raw: Json) -> Identity:
    """The identity in the identity ConfigMap.

    Raises:
        KubeError: somebody changed the ConfigMap so that it cannot be parsed.
    """
    data = raw.get("data") or {}
    try:
        formed = _texts(parse_json(data["formed"])) if data.get("formed") else {}
        first = [_texts(dict([pair])) for pair in parse_json(data["firstMasters"])]
        return Identity(
            resource_version=raw["metadata"]["resourceVersion"],
            cluster_id=_an_id(data["clusterUUID"]),
            owner_uid=data.get("ownerUID", ""),
            next_serial={"master": _count(data["nextMaster"]), "node": _count(data["nextNode"])},
            first_masters=tuple(FirstMaster(name, _an_id(of)) for pair in first for name, of in pair.items()),
            formed=formed,
            first_serial=_first_serials(data),
            fork_id=_an_id(data["forkID"]) if data.get("forkID") else "",
            asleep=data.get("asleep") == "true",
            masters=_count(data.get("masters", 0)) or len(formed),
            waking_s=_count(data.get("wakingSince") or 0),
        )
    except (KeyError, ValueError, TypeError) as exc:
        log.error(
            "the identity ConfigMap was changed and cannot be parsed",
            name=raw["metadata"]["name"],
            error=repr(exc),
        )
        advice = "restore it; or delete it, then the operator restores it from the claims"
        raise KubeError(
            0,
            "IdentityBroken",
            f"ConfigMap {raw['metadata']['name']} was changed and cannot be parsed ({exc!r}): {advice}",
        ) from exc


def _first_serials(data: Json) -> dict[Role, int]:
    keys: dict[Role, str] = {"master": "ownMaster", "node": "ownNode"}
    return {role: _count(data[key]) for role, key in keys.items() if key in data}


def _count(text: str | int) -> int:
    return whole_number(text, _COUNT_MAX)


def _an_id(text: str) -> str:
    if not is_id(text):
        raise ValueError(f"{text[:40]!r} is no identifier")
    return text


def _texts(value: Any) -> dict[str, str]:
    """The value, if it maps texts to texts.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(value, dict) or not all(isinstance(t, str) for pair in value.items() for t in pair):
        raise ValueError("it is no mapping of texts")
    return value


def _role(metadata: Json) -> Role | None:
    role = (metadata.get("labels") or {}).get(naming.LABEL_ROLE)
    return role if role in ("master", "node") else None


def parse_claim(raw: Json, cluster: str) -> Claim | None:
    """A claim as the API server gave it; None if its name is not a member's name."""
    metadata, spec = raw["metadata"], raw["spec"]
    annotations = metadata.get("annotations") or {}
    member = naming.member_of(cluster, metadata["name"])
    if member is None:
        return None
    role, serial = member
    released = annotations.get(naming.ANNOTATION_RELEASED, "")
    owners = [r for r in metadata.get("ownerReferences") or () if r.get("kind") == "TabletCluster"]
    return Claim(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        role=role,
        node_id=_id(annotations.get(naming.ANNOTATION_NODE_ID, "")),
        cluster_id=_id(annotations.get(naming.ANNOTATION_CLUSTER_ID, "")),
        serial=serial,
        zone=annotations.get(naming.ANNOTATION_ZONE, ""),
        phase=(raw.get("status") or {}).get("phase", "Pending"),
        deleting="deletionTimestamp" in metadata,
        selected_machine=annotations.get(naming.ANNOTATION_SELECTED_MACHINE, ""),
        requested_bytes=byte_count(str(spec["resources"]["requests"]["storage"])),
        created_s=seconds_of(metadata.get("creationTimestamp")),
        owned=bool(owners),
        format_id=annotations.get(naming.ANNOTATION_FORMAT_ID, ""),
        released_s=float(released) if released.isdecimal() else None,
        owner_uid=str(owners[0].get("uid", "")) if owners else "",
        labelled=naming.labels(cluster, role).items() <= (metadata.get("labels") or {}).items(),
        retired=naming.ANNOTATION_RETIRED in annotations,
        noted_uid=annotations.get(naming.ANNOTATION_CLAIM_UID, ""),
        fork_id=_id(annotations.get(naming.ANNOTATION_FORK_ID, "")),
        from_source=any(spec.get(source) for source in ("dataSource", "dataSourceRef")),
    )


def _id(text: str) -> str:
    return text if is_id(text) else ""


def _claims(raws: Sequence[Json], cluster: str) -> tuple[Claim, ...]:
    return tuple(c for c in (parse_claim(raw, cluster) for raw in raws) if c is not None)


def unlisted_claims(o: Observation) -> tuple[str, ...]:
    """Names of claims that should exist and were not listed. A claim that lost its labels exists, but the
    list omits it.
    """
    names = {p.name for p in o.pods}
    if o.identity is not None and not o.identity.formed:
        names |= {m.name for m in o.identity.first_masters}
    if o.catalog is not None:
        left = (n.node_id for n in o.catalog.view.nodes if n.state is not NodeState.RETIRED)
        names |= {o.catalog.names[node_id] for node_id in left if node_id in o.catalog.names}
    return tuple(sorted(names - {c.name for c in o.claims}))


def with_claims(o: Observation, raws: Sequence[Json]) -> Observation:
    """The observation with claims that were found by name. Claims that name another cluster are left out."""
    own = o.identity.cluster_id if o.identity is not None else ""
    found = tuple(c for c in _claims(raws, o.cluster.name) if c.cluster_id in (own, ""))
    return replace(o, claims=(*o.claims, *found))


def parse_pod(raw: Json) -> Pod | None:
    """A pod of the operator; None if somebody else created the pod."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    role = _role(metadata)
    if role is None:
        return None
    annotations = metadata.get("annotations") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    containers = {c["name"]: c for c in status.get("containerStatuses") or ()}
    container: Json = containers.get(naming.CONTAINER, {})  # webhooks may have added other containers
    state = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    waiting = state.get("waiting") or {}
    scheduled = conditions.get("PodScheduled") or {}
    unschedulable = scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else ""
    # A scheduling gate or a failed scheduler is not a lack of machines. Before scheduling no container waits.
    barred = scheduled if scheduled.get("status") == "False" and not unschedulable else {}
    told = waiting or barred
    waits = " ".join(str(told[k]) for k in ("reason", "message") if told.get(k))
    created_s = seconds_of(metadata.get("creationTimestamp"))
    readiness = conditions.get("Ready") or {}
    reason = str(ended.get("reason") or status.get("reason") or "")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        role=role,
        node_id=annotations.get(naming.ANNOTATION_NODE_ID, ""),
        claim_uid=annotations.get(naming.ANNOTATION_CLAIM_UID, ""),
        machine=raw["spec"].get("nodeName", ""),
        ip=status.get("podIP", ""),
        phase=status.get("phase", "Pending"),
        ready=readiness.get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        created_s=created_s,
        spec_hash=annotations.get(naming.ANNOTATION_HASH, ""),
        parked=naming.LABEL_PARKED in (metadata.get("labels") or {}),
        running="running" in state,
        restarts=int(container.get("restartCount", 0)),
        exit_code=ended.get("exitCode"),
        exit_message=str(ended.get("message") or status.get("message") or "").strip()[:300],
        exit_reason="" if reason in ("Error", "Completed") else reason,
        waiting="" if waits == "ContainerCreating" else waits[:300],
        unschedulable=unschedulable[:300],
        keeps_off=tuple(m for m in annotations.get(naming.ANNOTATION_KEEPS_OFF, "").split(",") if m),
        unready_since_s=max(created_s, seconds_of(readiness.get("lastTransitionTime"))),
        owners=tuple(metadata.get("ownerReferences") or ()),
    )


def parse_machine(raw: Json) -> Machine:
    """A Kubernetes node."""
    metadata = raw["metadata"]
    spec, labels = raw.get("spec") or {}, metadata.get("labels") or {}
    conditions = {c["type"]: c["status"] for c in (raw.get("status") or {}).get("conditions") or ()}
    return Machine(
        name=metadata["name"],
        ready=conditions.get("Ready") == "True",
        zone=labels.get(naming.LABEL_ZONE, ""),
        schedulable=not spec.get("unschedulable", False),
        labels=labels,
        taints=tuple(Taint(t["key"], t.get("value", ""), t["effect"]) for t in spec.get("taints") or ()),
    )


def parse_existing(kind: str, raw: Json) -> Existing:
    """A Service or PodDisruptionBudget of the operator."""
    metadata = raw["metadata"]
    digest = (metadata.get("annotations") or {}).get(naming.ANNOTATION_DIGEST, "")
    spec = raw.get("spec") or {}
    owners = tuple(metadata.get("ownerReferences") or ())
    return Existing(
        kind, metadata["name"], metadata["uid"], metadata["resourceVersion"], digest, spec, owners
    )


async def machines_if_allowed(kube: Kube) -> tuple[Machine, ...] | None:
    """All machines; None if no ClusterRole lets the operator read them."""
    try:
        return tuple(parse_machine(m) for m in await kube.list("Node", ""))
    except KubeError as exc:
        if exc.status in (401, 403):
            return None
        raise


async def observe_kubernetes(kube: Kube, raw: Json, default_image: str) -> tuple[Observation, list[Json]]:
    """What Kubernetes shows of one cluster, and the raw objects of its TabletGroups.

    `raw`: the TabletCluster, as it was just read.

    Raises:
        KubeError: a list failed.
    """
    cluster = parse_cluster(raw)
    namespace, selector = cluster.namespace, f"{naming.LABEL_CLUSTER}={cluster.name}"
    # Read the identity before the lists. Its compare-and-set then fails if the lists were outdated when the
    # plan was made.
    identity = await kube.get("ConfigMap", namespace, naming.identity_name(cluster.name))
    pods, claims, services, budgets, groups, machines = await asyncio.gather(
        kube.list("Pod", namespace, selector),
        kube.list("PersistentVolumeClaim", namespace, selector),
        kube.list("Service", namespace, selector),
        kube.list("PodDisruptionBudget", namespace, selector),
        kube.list("TabletGroup", namespace),
        machines_if_allowed(kube),
    )
    now_s, existing = kube.now_s(), (("Service", services), ("PodDisruptionBudget", budgets))

    def parsed() -> tuple[Observation, list[Json]]:
        mine = [g for g in groups if cluster_of(g) == cluster.name]
        seen = Observation(
            now_s=now_s,
            cluster=cluster,
            default_image=default_image,
            identity=parse_identity(identity) if identity is not None else None,
            claims=_claims(claims, cluster.name),
            pods=tuple(p for p in map(parse_pod, pods) if p is not None),
            machines=machines,
            existing=tuple(parse_existing(kind, item) for kind, items in existing for item in items),
            groups=tuple(parse_group(g) for g in mine),
            fresh_ids=tuple(new_id() for _ in range(_FRESH_IDS)),
        )
        return seen, mine

    return await asyncio.to_thread(parsed)


def cluster_of(group: Json) -> str:
    """The name of the TabletCluster that a raw TabletGroup names; "" if it names none."""
    reference = (group.get("spec") or {}).get("clusterRef")
    return str(reference.get("name", "")) if isinstance(reference, dict) else ""


async def observe_unlisted(kube: Kube, o: Observation) -> Observation:
    """The observation, with claims that lists omit added. They are found by their names.

    Raises:
        KubeError: a call failed.
    """
    names = unlisted_claims(o)
    if not names:
        return o
    everything = await kube.list("PersistentVolumeClaim", o.cluster.namespace)
    return with_claims(o, [raw for raw in everything if raw["metadata"]["name"] in names])


async def observe_masters(
    link: MasterLink, o: Observation
) -> tuple[tuple[MasterReport, ...], Catalog | None, str]:
    """Each master's report about itself, the leading master's catalog or None, and why that is None. Formed
    masters report only once.
    """
    pods = [p for p in o.pods if p.role == "master" and p.ip and p.running and not _is_down(o, p.machine)]
    addresses = [_address(p) for p in pods]
    link.learn(addresses)
    reports = await link.reports({(p.uid, p.restarts): _address(p) for p in pods})
    if o.identity is None or not o.identity.formed:
        return reports, None, "the cluster has not formed"
    if not addresses:
        return reports, None, "no master pod runs"
    try:
        return reports, await link.catalog(), ""
    except SteleError as exc:
        return reports, None, str(exc.args[0]).removeprefix("no master leads: ")


def _address(pod: Pod) -> str:
    return join_address(pod.ip, naming.PORT_MASTER)


def _is_down(o: Observation, name: str) -> bool:
    """Whether a machine is down. Each call to a machine that is down would cost a time-out."""
    machine = o.machine(name)
    return machine is not None and not machine.ready

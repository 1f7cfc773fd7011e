"""The requests: scenarios of steps, sent in this order to a real API server (record) and to stele_local (replay).

`$uid(step)` and `$rv(step)` in a path or body stand for what an earlier step of the scenario answered. Each scenario
has the namespace `contract`, made before and removed after all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kube_contract import definitions
from tests.kube_contract.crd import BASE, CRD, GROUP, NAME, shelf
from tests.kube_contract.steps import (
    BUDGET,
    CLAIM,
    CORE,
    CRDS,
    EVENT,
    JSON,
    LABEL,
    LEASE,
    NAMESPACE,
    SERVICE,
    SHELVES,
    TABLE,
    VOLUME,
    Step,
    config_map,
    delete,
    get,
    life,
    merge,
    owned,
    pod,
    post,
    put,
)

_NOWHERE = {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}

DISCOVERY = [
    get("version", "/version", part=True),
    get("core", "/api", part=True),
    get("groups", "/apis", part=True),
    get("core resources", "/api/v1", part=True),
    get("a group", "/apis/policy"),
    get("policy resources", "/apis/policy/v1", part=True),
    get("lease resources", "/apis/coordination.k8s.io/v1", part=True),
    get("definitions", "/apis/apiextensions.k8s.io/v1", part=True),
    get("no such group", "/apis/nope.dev"),
    get("no such version", "/apis/policy/v9"),
    get("no such kind", "/api/v1/nope"),
    get("no such kind in no such group", "/apis/nope.dev/v1/things"),
    get("no such path", "/nope"),
    get("healthy", "/readyz"),
    get("without a token", "/api", token=False),
    get("openapi", "/openapi/v3", part=True),
]

OBJECTS = [
    post("a", f"{CORE}/configmaps", config_map("a", labels={"app": "x", "tier": "gold"})),
    post("b", f"{CORE}/configmaps", config_map("b", labels={"app": "y"})),
    post(
        "generated name",
        f"{CORE}/configmaps",
        {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"generateName": "gen-"}},
    ),
    get("by equality", f"{CORE}/configmaps?labelSelector=app%3Dx"),
    get("by inequality", f"{CORE}/configmaps?labelSelector=app!%3Dx,app"),
    get("by set", f"{CORE}/configmaps?labelSelector=app+in+(x,y),tier+notin+(gold)"),
    get("by absence", f"{CORE}/configmaps?labelSelector=app,!tier"),
    get("bad selector", f"{CORE}/configmaps?labelSelector=a!!b"),
    get("bad field", f"{CORE}/configmaps?fieldSelector=spec.x%3D1"),
    get("one by table", f"{CORE}/configmaps/a", accept=TABLE),
    get("table without objects", f"{CORE}/configmaps?labelSelector=app%3Dx&includeObject=None", accept=TABLE),
    put("replace", f"{CORE}/configmaps/a", config_map("a", {"a": "2"})),
    put("replace an old version", f"{CORE}/configmaps/a", config_map("a", {"a": "3"}, resourceVersion="1")),
    put("replace what is not there", f"{CORE}/configmaps/zz", config_map("zz")),
    put("replace under another name", f"{CORE}/configmaps/a", config_map("b")),
    merge(
        "of this version",
        f"{CORE}/configmaps/a",
        {"metadata": {"resourceVersion": "$rv(replace)"}, "data": {"b": "1"}},
    ),
    merge("a key away", f"{CORE}/configmaps/a", {"data": {"a": None}}),
    merge("another uid", f"{CORE}/configmaps/a", {"metadata": {"uid": "1"}}),
    merge("dry", f"{CORE}/configmaps/a?dryRun=All", {"data": {"dry": "1"}}),
    get("still wet", f"{CORE}/configmaps/a"),
    merge("frozen", f"{CORE}/configmaps/b", {"immutable": True}),
    merge("frozen means frozen", f"{CORE}/configmaps/b", {"data": {"a": "9"}}),
    delete(
        "of this uid and version",
        f"{CORE}/configmaps/b",
        {"preconditions": {"uid": "$uid(b)", "resourceVersion": "$rv(frozen)"}},
    ),
    post("no name", f"{CORE}/configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}}),
    post("bad name", f"{CORE}/configmaps", config_map("B_b")),
    post("no such namespace", "/api/v1/namespaces/nowhere/configmaps", config_map("a")),
    post("another namespace", f"{CORE}/configmaps", config_map("a", namespace="other")),
    post("text", f"{CORE}/configmaps", "x", type="text/plain"),
    Step("patch as plain JSON", "PATCH", f"{CORE}/configmaps/a", {}, JSON),
    post(
        "owner without a name",
        f"{CORE}/configmaps",
        config_map("o", ownerReferences=[{"apiVersion": "v1", "kind": "Pod", "name": "", "uid": "u"}]),
    ),
    delete("tidy", f"{CORE}/configmaps/a"),
]

KINDS = {
    "kind configmap": life(f"{CORE}/configmaps", config_map("one"), LABEL),
    "kind secret": life(
        f"{CORE}/secrets",
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "one"}, "data": {"a": "MQ=="}},
        LABEL,
    ),
    "kind lease": life(
        "/apis/coordination.k8s.io/v1/namespaces/contract/leases", LEASE, {"spec": {"holderIdentity": "you"}}
    ),
    "kind poddisruptionbudget": life(
        "/apis/policy/v1/namespaces/contract/poddisruptionbudgets",
        BUDGET,
        {"spec": {"minAvailable": 1}},
        "observedGeneration",
    ),
    "kind service": life(f"{CORE}/services", SERVICE, {"spec": {"selector": {"app": "y"}}}),
    "kind event": life(f"{CORE}/events", EVENT, {"count": 2}),
    "kind persistentvolumeclaim": life(f"{CORE}/persistentvolumeclaims", CLAIM, LABEL),
    "kind persistentvolume": life("/api/v1/persistentvolumes", VOLUME, LABEL, "Available"),
    "kind pod": life(f"{CORE}/pods", pod("lost", **_NOWHERE), LABEL, "PodScheduled"),
    "kind node": life(
        "/api/v1/nodes",
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "ghost"}},
        {"spec": {"unschedulable": True}},
    ),
    "kind customresourcedefinition": [
        post("create", CRDS, CRD),
        post("create again", CRDS, CRD),
        get("served", BASE, until=200, part=True),
        get("get", f"{CRDS}/{NAME}"),
        get("table", f"{CRDS}/{NAME}", accept=TABLE),
        get("its group", f"/apis/{GROUP}"),
    ],
}

PODS = [
    post("bound", f"{CORE}/pods", pod("bound", nodeName="nowhere", terminationGracePeriodSeconds=20)),
    merge("another command", f"{CORE}/pods/bound", {"spec": {"hostname": "x"}}),
    merge("its status", f"{CORE}/pods/bound/status", {"status": {"phase": "Running", "podIP": "127.0.9.9"}}),
    get("of that machine", f"{CORE}/pods?fieldSelector=spec.nodeName%3Dnowhere,status.phase%3DRunning"),
    get("not of that machine", f"{CORE}/pods?fieldSelector=spec.nodeName!%3Dnowhere"),
    delete("gracefully", f"{CORE}/pods/bound"),
    delete("shorter", f"{CORE}/pods/bound", {"gracePeriodSeconds": 5}),
    get("terminating", f"{CORE}/pods/bound", accept=TABLE),
    delete(
        "by force", f"{CORE}/pods/bound", {"gracePeriodSeconds": 0, "preconditions": {"uid": "$uid(bound)"}}
    ),
    get("gone", f"{CORE}/pods/bound"),
    post(
        "no containers",
        f"{CORE}/pods",
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "none"}, "spec": {"containers": []}},
    ),
]

_CLAIMED = [{"name": "data", "persistentVolumeClaim": {"claimName": "data-0"}}]
CLAIMS = [
    post("claim", f"{CORE}/persistentvolumeclaims", CLAIM),
    merge(
        "grow before it is bound",
        f"{CORE}/persistentvolumeclaims/data-0",
        {"spec": {"resources": {"requests": {"storage": "2Gi"}}}},
    ),
    merge("another class", f"{CORE}/persistentvolumeclaims/data-0", {"spec": {"storageClassName": "other"}}),
    post(
        "a user of it",
        f"{CORE}/pods",
        pod("user", nodeName="nowhere", volumes=_CLAIMED),
    ),
    delete("delete while in use", f"{CORE}/persistentvolumeclaims/data-0"),
    get("still there", f"{CORE}/persistentvolumeclaims/data-0"),
    delete("delete the user", f"{CORE}/pods/user", {"gracePeriodSeconds": 0}),
    get("gone then", f"{CORE}/persistentvolumeclaims/data-0", until=404),
    post("another claim", f"{CORE}/persistentvolumeclaims", CLAIM),
    post("a user without a machine", f"{CORE}/pods", pod("waits", **_NOWHERE, volumes=_CLAIMED)),
    delete("does not hold it", f"{CORE}/persistentvolumeclaims/data-0"),
    get("gone too", f"{CORE}/persistentvolumeclaims/data-0", until=404),
]


def _refused(name: str, spec: Any) -> Step:
    return post(name, SHELVES, shelf("b", spec))


SCHEMA = [
    post("defaults, pruning, nulls", SHELVES, shelf("a", {"n": {}, "bogus": 1, "any": {"x": {"y": 1}}, "note": None, "mode": None, "big": None})),
    get("get", f"{SHELVES}/a"),
    _refused("enum", {"n": {"replicas": 2}}),
    _refused("required", {}),
    _refused("required is null", {"n": None}),
    _refused("types", {"n": {"replicas": "three", "max": "x"}, "labels": {"a": 1}, "port": True, "set": "x", "any": [], "big": 0, "list": {}}),
    _refused("spec is no object", "x"),
    _refused("bounds", {"n": {"max": 10}, "ratio": 0, "step": 7, "count": 1}),
    _refused("more bounds", {"n": {"max": 0}, "ratio": 1.5}),
    _refused("strings", {"n": {}, "note": "a", "size": "10", "at": "noon", "mode": "C"}),
    _refused("too long", {"n": {}, "note": "toolong"}),
    _refused("too many", {"n": {}, "list": [{"name": "a"}, {"name": "b"}, {"name": "c"}, {"name": "d"}], "labels": {"a": "1", "b": "2", "c": "3"}}),
    _refused("too few", {"n": {}, "list": []}),
    _refused("missing in a list", {"n": {}, "list": [{"v": 1}]}),
    _refused("duplicates", {"n": {}, "list": [{"name": "a"}, {"name": "a"}], "set": ["a", "a"]}),
    _refused("number for int or string", {"n": {}, "port": 1.5}),
    post("no spec", SHELVES, {"apiVersion": f"{GROUP}/v1", "kind": "Shelf", "metadata": {"name": "b"}}),
    post("no name", SHELVES, {"apiVersion": f"{GROUP}/v1", "kind": "Shelf", "metadata": {}, "spec": {"n": {}}}),
    post("bad name", SHELVES, shelf("B_b", {"n": {}})),
    post("strict", f"{SHELVES}?fieldValidation=Strict", shelf("c", {"n": {"zz": 1}, "bogus": 1})),
    post("warn", f"{SHELVES}?fieldValidation=Warn", shelf("c", {"n": {"zz": 1}, "bogus": 1})),
    post("ignore", f"{SHELVES}?fieldValidation=Ignore", shelf("d", {"n": {"zz": 1}})),
    merge("strict patch", f"{SHELVES}/c?fieldValidation=Strict", {"spec": {"bogus": 1}}),
    post("dry", f"{SHELVES}?dryRun=All", shelf("e", {"n": {}})),
    post("generated", SHELVES, {"apiVersion": f"{GROUP}/v1", "kind": "Shelf", "metadata": {"generateName": "gen-"}, "spec": {"n": {}}, "status": {"phase": "Up"}}),
    post("another kind", SHELVES, {**shelf("f", {"n": {"replicas": 3}}), "kind": "Shelv"}),
    post("another version", SHELVES, {**shelf("f", {"n": {}}), "apiVersion": f"{GROUP}/v2"}),
    post("text", SHELVES, "x", type="text/plain"),
    Step("patch as plain JSON", "PATCH", f"{SHELVES}/a", {}, JSON),
    merge("default again", f"{SHELVES}/a", {"spec": {"mode": None}}),
    merge("bad patch", f"{SHELVES}/a", {"spec": {"n": {"replicas": 4}}}),
    merge("patch to another name", f"{SHELVES}/a", {"metadata": {"name": "zz"}}),
    merge("patch what is not there", f"{SHELVES}/zz", {"spec": {}}),
    put("replace without a version", f"{SHELVES}/a", shelf("a", {"n": {}})),
    put("replace", f"{SHELVES}/a", shelf("a", {"n": {"replicas": 1}}, resourceVersion="$rv(get)")),
    get("list", f"{SHELVES}?labelSelector=none"),
]  # fmt: skip

RULES = [
    _refused("field path", {"n": {"replicas": 20}}),
    _refused("no message", {"n": {"replicas": 5}, "big": False}),
    _refused("message expression", {"n": {}, "list": [{"name": "forbidden"}]}),
    _refused("scalar", {"n": {}, "count": 2}),
    _refused("two at once", {"n": {"replicas": 20}, "count": 2}),
    post("at the root", SHELVES, shelf("a-name-that-is-long", {"n": {}})),
    post(
        "fine",
        SHELVES,
        shelf("r", {"n": {}, "size": "1Gi", "fixed": {"name": "x"}, "list": [{"name": "a", "v": 5}]}),
    ),
    merge("shrink", f"{SHELVES}/r", {"spec": {"size": "512Mi"}}),
    merge("grow", f"{SHELVES}/r", {"spec": {"size": "2048Mi"}}),
    merge("immutable", f"{SHELVES}/r", {"spec": {"fixed": {"name": "y"}}}),
    merge(
        "in a keyed list", f"{SHELVES}/r", {"spec": {"list": [{"name": "b", "v": 1}, {"name": "a", "v": 4}]}}
    ),
    merge("a new item", f"{SHELVES}/r", {"spec": {"list": [{"name": "b", "v": 1}, {"name": "a", "v": 6}]}}),
]

STATUS = [
    post("s", SHELVES, {**shelf("s", {"n": {}}), "status": {"phase": "Up"}}),
    merge("status through the object", f"{SHELVES}/s", {"status": {"phase": "Up"}}),
    merge("status", f"{SHELVES}/s/status", {"status": {"replicas": 2, "selector": "a=b", "bogus": 1, "conditions": [{"type": "Ready", "status": "True"}]}, "spec": {"mode": "B"}, "metadata": {"labels": {"q": "1"}}}),
    merge("bad status", f"{SHELVES}/s/status", {"status": {"phase": "Sideways"}}),
    merge("status of an old version", f"{SHELVES}/s/status", {"metadata": {"resourceVersion": "1"}, "status": {"replicas": 3}}),
    get("status", f"{SHELVES}/s/status"),
    get("scale", f"{SHELVES}/s/scale"),
    merge("scaled", f"{SHELVES}/s/scale", {"spec": {"replicas": 5}}),
    merge("badly scaled", f"{SHELVES}/s/scale", {"spec": {"replicas": 4}}),
    put("scale put", f"{SHELVES}/s/scale", {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "s", "namespace": NAMESPACE}, "spec": {"replicas": 3}}),
    get("table", f"{SHELVES}?fieldSelector=metadata.name%3Ds", accept=TABLE),
    get("no such subresource", f"{SHELVES}/s/nope"),
]  # fmt: skip

FINALIZERS = [
    post("f", SHELVES, shelf("f", {"n": {}}, finalizers=["stele.dev/x", "stele.dev/y"])),
    delete("delete", f"{SHELVES}/f"),
    delete("delete again", f"{SHELVES}/f"),
    merge("one away", f"{SHELVES}/f", {"metadata": {"finalizers": ["stele.dev/x"]}}),
    merge("a new one", f"{SHELVES}/f", {"metadata": {"finalizers": ["stele.dev/x", "stele.dev/z"]}}),
    merge("status while it goes", f"{SHELVES}/f/status", {"status": {"phase": "Down"}}),
    merge("spec while it goes", f"{SHELVES}/f", {"spec": {"mode": "B"}}),
    merge("the last away", f"{SHELVES}/f", {"metadata": {"finalizers": None}}),
    get("gone", f"{SHELVES}/f"),
    post("g", SHELVES, shelf("g", {"n": {}})),
    delete("without finalizers", f"{SHELVES}/g", {"preconditions": {"uid": "$uid(g)"}}),
    delete("what is gone", f"{SHELVES}/g"),
    delete("another uid", f"{SHELVES}/a", {"preconditions": {"uid": "nope"}}),
    delete("another version", f"{SHELVES}/a", {"preconditions": {"resourceVersion": "1"}}),
]

GARBAGE = [
    post("owner1", f"{CORE}/configmaps", config_map("owner1")),
    post("child1", f"{CORE}/configmaps", owned("child1", "owner1")),
    delete("background", f"{CORE}/configmaps/owner1", {"propagationPolicy": "Background"}),
    get("child gone", f"{CORE}/configmaps/child1", until=404),
    post("owner2", f"{CORE}/configmaps", config_map("owner2")),
    post("child2", f"{CORE}/configmaps", {**owned("child2", "owner2", blockOwnerDeletion=True), "metadata": {**owned("child2", "owner2", blockOwnerDeletion=True)["metadata"], "finalizers": ["stele.dev/hold"]}}),
    delete("foreground", f"{CORE}/configmaps/owner2", {"propagationPolicy": "Foreground"}),
    get("owner waits", f"{CORE}/configmaps/owner2"),
    get("child waits too", f"{CORE}/configmaps/child2", settled="deletionTimestamp"),
    merge("let the child go", f"{CORE}/configmaps/child2", {"metadata": {"finalizers": None}}),
    get("child2 gone", f"{CORE}/configmaps/child2", until=404),
    get("owner2 gone", f"{CORE}/configmaps/owner2", until=404),
    post("owner3", f"{CORE}/configmaps", config_map("owner3")),
    post("child3", f"{CORE}/configmaps", owned("child3", "owner3")),
    delete("orphan", f"{CORE}/configmaps/owner3", {"propagationPolicy": "Orphan"}),
    get("owner3 gone", f"{CORE}/configmaps/owner3", until=404),
    get("child3 stays", f"{CORE}/configmaps/child3"),
    post("child of nobody", f"{CORE}/configmaps", config_map("child4", ownerReferences=[{"apiVersion": "v1", "kind": "ConfigMap", "name": "never", "uid": "00000000-0000-0000-0000-000000000000"}])),
    get("goes too", f"{CORE}/configmaps/child4", until=404),
    delete("tidy", f"{CORE}/configmaps/child3"),
]  # fmt: skip

_WATCHED = f"{SHELVES}?watch=1&labelSelector=watched&timeoutSeconds=3"
WATCHES = [
    post("w1", SHELVES, shelf("w1", {"n": {}}, labels={"watched": "1"})),
    get("list", f"{SHELVES}?labelSelector=watched"),
    get(
        "sequence",
        f"{_WATCHED}&resourceVersion=$rv(list)",
        alongside=[
            merge("change", f"{SHELVES}/w1", {"spec": {"mode": "B"}}),
            post("w2", SHELVES, shelf("w2", {"n": {}}, labels={"watched": "1"})),
            post("w3", SHELVES, shelf("w3", {"n": {}})),
            merge("leaves", f"{SHELVES}/w2", {"metadata": {"labels": None}}),
            merge("enters", f"{SHELVES}/w3", {"metadata": {"labels": {"watched": "1"}}}),
            merge("status", f"{SHELVES}/w3/status", {"status": {"phase": "Up"}}),
            delete("gone", f"{SHELVES}/w1"),
        ],
    ),
    get("from a version in between", f"{_WATCHED}&resourceVersion=$rv(w1)&timeoutSeconds=1"),
    get("from the start", f"{_WATCHED}&timeoutSeconds=1"),
    get("from zero", f"{_WATCHED}&resourceVersion=0&timeoutSeconds=1"),
    get("with bookmarks", f"{_WATCHED}&allowWatchBookmarks=true&resourceVersion=$rv(w1)"),
    get(
        "initial events",
        f"{_WATCHED}&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=1",
    ),
    get("as tables", f"{_WATCHED}&timeoutSeconds=1", accept=TABLE),
    get("too old", f"{_WATCHED}&resourceVersion=1&timeoutSeconds=1"),
    get("no version", f"{_WATCHED}&resourceVersion=x&timeoutSeconds=1"),
    get("by name", f"{SHELVES}?watch=1&timeoutSeconds=1&fieldSelector=metadata.name%3Dw2"),
]

NAMESPACES = [
    post(
        "create",
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "contract-two"}},
    ),
    post(
        "a map in it",
        "/api/v1/namespaces/contract-two/configmaps",
        config_map("held", finalizers=["stele.dev/hold"]),
    ),
    get("table", "/api/v1/namespaces/contract-two", accept=TABLE),
    merge("labelled", "/api/v1/namespaces/contract-two", LABEL),
    delete("delete", "/api/v1/namespaces/contract-two"),
    get("map goes", "/api/v1/namespaces/contract-two/configmaps/held", settled="deletionTimestamp"),
    post("nothing new", "/api/v1/namespaces/contract-two/configmaps", config_map("new")),
    merge("let go", "/api/v1/namespaces/contract-two/configmaps/held", {"metadata": {"finalizers": None}}),
    get("gone", "/api/v1/namespaces/contract-two", until=404),
    get("no such", "/api/v1/namespaces/contract-three"),
]

LAST = [
    post("held", SHELVES, shelf("held", {"n": {}}, finalizers=["stele.dev/hold"])),
    delete("delete the definition", f"{CRDS}/{NAME}"),
    get("held goes", f"{SHELVES}/held", settled="deletionTimestamp"),
    merge("let go", f"{SHELVES}/held", {"metadata": {"finalizers": None}}),
    get("definition gone", f"{CRDS}/{NAME}", until=404),
    get("kind gone", f"{BASE}/namespaces/{NAMESPACE}/shelves", until=404),
]

DEFINITIONS = [
    post("a rule that assumes a field", CRDS, definitions.ASSUMES_A_FIELD),
    post("broken by their defaults", CRDS, definitions.BROKEN_BY_ITS_DEFAULT),
    post("a rule with a guard", f"{CRDS}?dryRun=All", definitions.GUARDED, part=True),
]

SCENARIOS: dict[str, Sequence[Step]] = {
    "discovery": DISCOVERY,
    "objects": OBJECTS,
    **KINDS,
    "pods": PODS,
    "claims": CLAIMS,
    "schema": SCHEMA,
    "rules": RULES,
    "status and scale": STATUS,
    "finalizers": FINALIZERS,
    "garbage": GARBAGE,
    "watches": WATCHES,
    "namespaces": NAMESPACES,
    "the definition goes": LAST,
    "definitions": DEFINITIONS,
}

"""Create, get, list, update, patch, delete: the rules of the API without HTTP. Used by `http` and by the
controllers.

Owns: the admission of an object (metadata, schema, CEL, built-in rules) and the steps of its deletion. Knows
no requests or watch streams. Invariant: every write passes `_admit`, so a stored object was valid when it was
written.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stele_local import builtin, schema, status
from stele_local.cel import MISSING, Rules, faults_of_defaults
from stele_local.kinds import BUILT_IN, CRD, NAMESPACE, POD, Kind, from_crd
from stele_local.objects import drop_nulls, find, merge_patch, now, parse_time, random_suffix, stamp, without
from stele_local.selection import parse_fields, parse_labels
from stele_local.status import Cause
from stele_local.store import Store

Json = dict[str, Any]
FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_BAD_NAME = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write. `obj`: the object as stored, or on a dry run as it would be stored. `unknown`:
    fields that were dropped because no schema has them.
    """

    obj: Json
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write. `strict`: refuse unknown fields instead of dropping them (fieldValidation=Strict).
    `patch`: the write is a patch, which changes some messages.
    """

    dry_run: bool = False
    strict: bool = False
    patch: bool = False


PLAIN = WriteOptions()


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    uid: str | None = None
    resource_version: str | None = None
    grace_seconds: int | None = None
    propagation: str = "Background"


class Registry:
    """All kinds and their objects. Definitions that the store already holds are served from the start."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._kinds: dict[tuple[str, str, str], Kind] = {(k.group, k.version, k.plural): k for k in BUILT_IN}
        for crd in store.objects(CRD.key):
            self._serve(copy.deepcopy(crd))
        for name in ("default", "kube-system"):
            if store.get(NAMESPACE.key, "", name) is None:
                self.create(NAMESPACE, "", {"metadata": {"name": name}})

    # -- kinds

    def kinds(self) -> list[Kind]:
        return list(self._kinds.values())

    def kind(self, group: str, version: str, plural: str) -> Kind | None:
        return self._kinds.get((group, version, plural))

    def kind_of(self, table: tuple[str, str]) -> Kind:
        return next(k for k in self._kinds.values() if k.key == table and k.preferred)

    def _serve(self, crd: Json) -> Json:
        """Begin to serve a definition. Returns the definition with its conditions."""
        kinds = [replace(kind, rules=Rules(kind.schema or {})) for kind in from_crd(crd)]
        self._unserve(crd)
        for kind in kinds:
            self.store.open_table(kind.key)
            self._kinds[kind.group, kind.version, kind.plural] = kind
        since = (find(crd, "status", "conditions") or [{}])[0].get("lastTransitionTime") or now()
        told = [
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ]
        names = crd["spec"]["names"]
        crd["status"] = {
            "acceptedNames": names,
            "conditions": [
                {"type": t, "status": "True", "reason": r, "message": m, "lastTransitionTime": since}
                for t, r, m in told
            ],
            "storedVersions": [v["name"] for v in crd["spec"]["versions"] if v.get("storage")],
        }
        return crd

    def _unserve(self, crd: Json) -> None:
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        for key in [k for k in self._kinds if k[0] == group and k[2] == plural]:
            del self._kinds[key]

    # -- reading

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """The stored object. It is shared and must not be changed.

        Raises:
            ApiError: 404, there is no such object.
        """
        obj = self.store.get(kind.key, namespace, name)
        if obj is None:
            raise status.not_found(kind.plural, kind.group, name)
        return obj

    def find(self, kind: Kind, namespace: str, name: str) -> Json | None:
        return self.store.get(kind.key, namespace, name)

    def list(
        self, kind: Kind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Json]:
        wanted, chosen = parse_labels(labels), parse_fields(fields, kind.selectable, kind.custom)
        return [obj for obj in self.store.objects(kind.key, namespace) if wanted(obj) and chosen(obj)]

    # -- writing

    def create(self, kind: Kind, namespace: str, body: Json, options: WriteOptions = PLAIN) -> Written:
        obj = copy.deepcopy(body) if kind.custom else drop_nulls(body)
        metadata = obj.setdefault("metadata", {})
        metadata = obj["metadata"] = {k: v for k, v in metadata.items() if v is not None}
        self._check_namespace(kind, namespace, metadata)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + random_suffix()
        for key in (
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "managedFields",
            "selfLink",
            "generation",
        ):
            metadata.pop(key, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.namespaced:
            metadata["namespace"] = namespace
        if kind.generation:
            metadata["generation"] = 1
        if kind.status:
            obj.pop("status", None)
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, **without(obj, "apiVersion", "kind")}
        if kind is CRD:
            _default_crd(obj)
        if not kind.custom:
            builtin.on_create(kind.plural, obj)
        unknown = self._admit(kind, obj, None, options)
        if self.store.get(kind.key, metadata.get("namespace", ""), metadata["name"]):
            raise status.already_exists(kind.plural, kind.group, metadata["name"])
        if options.dry_run:
            return Written(obj, unknown)
        stored = self.store.put(kind.key, obj)
        if kind is CRD:
            self.store.put(CRD.key, self._serve(copy.deepcopy(stored)))
        return Written(stored, unknown)

    def _check_namespace(self, kind: Kind, namespace: str, metadata: Json) -> None:
        if not kind.namespaced:
            return
        if metadata.get("namespace") not in (None, "", namespace):
            raise status.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        home = self.store.get(NAMESPACE.key, "", namespace)
        if home is None:
            raise status.not_found("namespaces", "", namespace)
        if home["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise status.forbidden(kind.plural, kind.group, metadata.get("name", ""), why, causes=[cause])

    def patch(
        self, kind: Kind, namespace: str, name: str, patch: Json, sub: str = "", options: WriteOptions = PLAIN
    ) -> Written:
        """Apply a merge patch (RFC 7386). If the patch has a resourceVersion, it must equal the object's."""
        old = self.get(kind, namespace, name)
        return self.replace(kind, namespace, name, merge_patch(old, patch), sub, options)

    def change(self, kind: Kind, obj: Json, alter: Callable[[Json], None], sub: str = "") -> Json | None:
        """For controllers: change the newest state of `obj` with `alter`. Returns the object, or None if it
        is gone or was created again.
        """
        metadata = obj["metadata"]
        newest = self.find(kind, metadata.get("namespace", ""), metadata["name"])
        if newest is None or newest["metadata"]["uid"] != metadata["uid"]:
            return None
        new = copy.deepcopy(newest)
        alter(new)
        return self._update(kind, newest, new, sub).obj

    def replace(
        self, kind: Kind, namespace: str, name: str, body: Json, sub: str = "", options: WriteOptions = PLAIN
    ) -> Written:
        old, new = self.get(kind, namespace, name), copy.deepcopy(body)
        metadata = new.setdefault("metadata", {})
        if metadata.get("name") not in (None, name):
            raise status.bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        if kind.namespaced and metadata.get("namespace") not in (None, "", namespace):
            raise status.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        if metadata.get("uid") not in (None, old["metadata"]["uid"]):
            cause = Cause(
                "FieldValueInvalid", f'Invalid value: "{metadata["uid"]}": field is immutable', "metadata.uid"
            )
            raise status.invalid(kind.kind, kind.group, name, [cause, cause])
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise status.modified(kind.plural, kind.group, name)
        if kind.custom and not metadata.get("resourceVersion"):
            told = "Invalid value: 0: must be specified for an update"
            cause = Cause("FieldValueInvalid", told, "metadata.resourceVersion")
            raise status.invalid(kind.plural, kind.group, name, [cause])
        return self._update(kind, old, new, sub, options)

    def _update(self, kind: Kind, old: Json, new: Json, sub: str, options: WriteOptions = PLAIN) -> Written:
        """Store an update. It may change `new`. An update that changes nothing is not written."""
        before = old["metadata"]
        if sub == "status":
            new = {
                **copy.deepcopy(without(old, "status")),
                **({"status": new["status"]} if new.get("status") else {}),
            }
        elif kind.status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        metadata = new["metadata"] = {k: v for k, v in {**new["metadata"]}.items() if v not in (None, {}, [])}
        for key in (
            "uid",
            "name",
            "namespace",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generateName",
        ):
            metadata.pop(key, None)
            if key in before:
                metadata[key] = before[key]
        metadata["resourceVersion"] = before["resourceVersion"]
        if "generation" in before:
            metadata["generation"] = before["generation"]
        metadata.pop("managedFields", None)
        new = {"apiVersion": kind.api_version, "kind": kind.kind, **without(new, "apiVersion", "kind")}
        _check_finalizers(kind, before, metadata)
        if not kind.custom and sub == "":
            builtin.on_update(kind.plural, old, new)
        unknown = self._admit(kind, new, old, options)
        if kind.generation and without(new, "metadata", "status") != without(old, "metadata", "status"):
            metadata["generation"] = before.get("generation", 0) + 1
        if new == old:
            return Written(old, unknown)
        if options.dry_run:
            return Written(new, unknown)
        if kind is CRD and sub == "" and new["spec"] != old["spec"]:
            new = self._serve(new)
        if _may_go(kind, metadata, new):
            self._remove(kind, new)
            return Written(new, unknown)
        return Written(self.store.put(kind.key, new), unknown)

    def _admit(self, kind: Kind, obj: Json, old: Json | None, options: WriteOptions) -> tuple[str, ...]:
        """Prune unknown fields, fill in defaults, and validate. Returns the unknown fields.

        Raises:
            ApiError: 422, with every fault.
        """
        name = obj["metadata"].get("name", "")
        causes = _check_metadata(obj["metadata"])
        if kind is CRD:
            causes += _check_defaults(obj)
        unknown: list[str] = []
        if kind.schema is not None:
            shown = json.dumps(obj) if options.strict and options.patch else ""
            unknown = sorted(schema.prune(obj, kind.schema))
            if unknown and options.strict:
                raise _strict_fault(kind, unknown, shown)
            schema.set_defaults(obj, kind.schema)
            causes += schema.validate(without(obj, "metadata"), kind.schema)
            if kind.scale:
                causes += schema.check_scale(obj, kind.scale)
            causes += schema.duplicates(obj, kind.schema)
            if schema.blocks(causes):
                causes.append(schema.UNCHECKED)
            else:
                causes += kind.rules.check(obj, MISSING if old is None else old)
        if causes:
            raise status.invalid(kind.kind, kind.group, name, causes)
        return tuple(unknown)

    # -- deleting

    def delete(
        self, kind: Kind, namespace: str, name: str, options: DeleteOptions, dry_run: bool = False
    ) -> tuple[Json, bool]:
        """Begin or end a deletion. Returns the object, and whether it is gone.

        Raises:
            ApiError: 404, there is no such object; or 409, a precondition does not hold.
        """
        old = self.get(kind, namespace, name)
        metadata = old["metadata"]
        if options.uid not in (None, metadata["uid"]):
            raise status.conflict(
                kind.kind, kind.group, name,
                f"the UID in the precondition ({options.uid}) does not match the UID in record ({metadata['uid']}). "
                "The object might have been deleted and then recreated",
            )  # fmt: skip
        if options.resource_version not in (None, metadata["resourceVersion"]):
            raise status.conflict(
                kind.kind, kind.group, name,
                f"the ResourceVersion in the precondition ({options.resource_version}) does not match the ResourceVersion "
                f"in record ({metadata['resourceVersion']}). The object might have been modified",
            )  # fmt: skip
        if dry_run:
            return old, False
        new = {**old, "metadata": dict(metadata)}
        self._hold(kind, new, options)
        held = new["metadata"].get("finalizers") or find(new, "spec", "finalizers")
        if kind is not POD and not held:
            return self._remove(kind, new), True
        self._mark(kind, new, options)
        if _may_go(kind, new["metadata"], new):
            return self._remove(kind, new), True
        if new != old:
            new = self.store.put(kind.key, new)
        return new, False

    def _hold(self, kind: Kind, new: Json, options: DeleteOptions) -> None:
        """Add the finalizer for foreground deletion or orphaning, if one is asked for."""
        metadata = new["metadata"]
        finalizers = [f for f in metadata.get("finalizers", []) if f not in (FOREGROUND, ORPHAN)]
        if options.propagation == "Foreground":
            finalizers.append(FOREGROUND)
        elif options.propagation == "Orphan":
            finalizers.append(ORPHAN)
        if kind is CRD and CRD_CLEANUP not in finalizers:
            finalizers.append(CRD_CLEANUP)
        metadata.pop("finalizers", None)
        if finalizers:
            metadata["finalizers"] = finalizers

    def _mark(self, kind: Kind, new: Json, options: DeleteOptions) -> None:
        metadata = new["metadata"]
        grace = self._grace_seconds(kind, new, options)
        if "deletionTimestamp" in metadata:
            if grace >= metadata.get("deletionGracePeriodSeconds", 0):
                return
        elif kind is NAMESPACE:
            new["status"] = {**new["status"], "phase": "Terminating"}
        elif kind is CRD:
            told = "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon"
            going = {
                "type": "Terminating",
                "status": "True",
                "reason": "InstanceDeletionPending",
                "message": told,
            }
            conditions = [*new["status"]["conditions"], {**going, "lastTransitionTime": now()}]
            new["status"] = {**new["status"], "conditions": conditions}
        elif "generation" in metadata:
            metadata["generation"] += 1
        if kind not in (NAMESPACE, CRD):
            metadata["deletionGracePeriodSeconds"] = grace
        metadata["deletionTimestamp"] = stamp_after(grace)

    def _grace_seconds(self, kind: Kind, obj: Json, options: DeleteOptions) -> int:
        if kind is not POD:
            return 0
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
            return 0
        if options.grace_seconds is not None:
            return max(0, options.grace_seconds)
        return int(obj["spec"]["terminationGracePeriodSeconds"])

    def _remove(self, kind: Kind, obj: Json) -> Json:
        last = self.store.remove(kind.key, obj)
        if kind is CRD:
            self._unserve(obj)
            self.store.drop_table((obj["spec"]["group"], obj["spec"]["names"]["plural"]))
        return last


def _strict_fault(kind: Kind, unknown: list[str], patched: str) -> status.ApiError:
    told = "strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in unknown)
    if patched:
        cause = Cause("FieldValueInvalid", f"Invalid value: {json.dumps(patched)}: {told}", "patch")
        return status.invalid("", "", "", [cause])
    return status.bad_request(
        f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: {told}'
    )


def stamp_after(seconds: int) -> str:
    return stamp(parse_time(now()) + datetime.timedelta(seconds=seconds))


def _may_go(kind: Kind, metadata: Json, obj: Json) -> bool:
    """Whether a deleted object can be removed now: it has no finalizer, and its grace period is over."""
    if "deletionTimestamp" not in metadata or metadata.get("finalizers"):
        return False
    if kind is NAMESPACE:
        return not find(obj, "spec", "finalizers")
    return not metadata.get("deletionGracePeriodSeconds")


def _check_defaults(definition: Json) -> list[Cause]:
    """Faults of a definition's defaults, with the paths that a real API server reports."""
    schemas = [find(v, "schema", "openAPIV3Schema", default={}) for v in definition["spec"]["versions"]]
    return [c for s in schemas for c in faults_of_defaults(s, "spec.validation.openAPIV3Schema")]


def _check_metadata(metadata: Json) -> list[Cause]:
    name = metadata.get("name")
    if not name:
        return [
            Cause("FieldValueRequired", "Required value: name or generateName is required", "metadata.name")
        ]
    causes = []
    if not _NAME.fullmatch(name) or len(name) > 253:
        causes.append(Cause("FieldValueInvalid", f'Invalid value: "{name}": {_BAD_NAME}', "metadata.name"))
    for owner in metadata.get("ownerReferences") or ():
        for word in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(word):
                shown = json.dumps(owner.get(word, ""))
                why = f"Invalid value: {shown}: {'version ' if word == 'apiVersion' else ''}must not be empty"
                causes.append(Cause("FieldValueInvalid", why, f"metadata.ownerReferences.{word}"))
    return causes


def _check_finalizers(kind: Kind, before: Json, after: Json) -> None:
    added = [f for f in after.get("finalizers", []) if f not in before.get("finalizers", [])]
    if "deletionTimestamp" in before and added:
        shown = ", ".join(f'"{f}"' for f in added)
        why = (
            "Forbidden: no new finalizers can be added if the object is being deleted, "
            f"found new finalizers []string{{{shown}}}"
        )
        cause = Cause("FieldValueForbidden", why, "metadata.finalizers")
        raise status.invalid(kind.kind, kind.group, before["name"], [cause] * (1 + kind.custom))


def _default_crd(crd: Json) -> None:
    names = crd["spec"]["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    crd["spec"].setdefault("conversion", {"strategy": "None"})
    versions = [version["name"] for version in crd["spec"]["versions"] if version.get("storage")]
    crd["status"] = {
        "conditions": None,
        "acceptedNames": {"plural": "", "kind": ""},
        "storedVersions": versions,
    }

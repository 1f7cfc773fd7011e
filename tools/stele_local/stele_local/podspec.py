"""Converts a container's spec to the environment, arguments and real folders of a process. Starts nothing.

Processes see the real file system. So a mountPath in an argument or variable is replaced by its real folder.
It is recognized at the start of the text, or after `=`, `:` or `,`. Raises NotYet while a part is missing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stele_local import volumes
from stele_local.kinds import CONFIG_MAP, PV, PVC, SECRET, Kind
from stele_local.machines import Machines
from stele_local.objects import find
from stele_local.registry import Registry

Json = dict[str, Any]
_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")


class NotYet(Exception):
    """A volume, claim or config map is missing. `reason` goes into the event and into the container's state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message

    @property
    def state(self) -> Json:
        """The state of a container that waits for the missing part."""
        reason = "ContainerCreating" if self.reason == "FailedMount" else self.reason
        return {"waiting": {"reason": reason, "message": self.message}}


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a pod's volumes and variables."""

    registry: Registry
    machines: Machines


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does: unknown names stay as they are, and `$$` becomes one dollar."""
    return _VARIABLE.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


def _data(sources: Sources, kind: Kind, namespace: str, name: str, optional: bool) -> dict[str, bytes]:
    obj = sources.registry.find(kind, namespace, name)
    if obj is None:
        if optional:
            return {}
        raise NotYet("CreateContainerConfigError", f'{kind.kind.lower()} "{name}" not found')
    if kind is SECRET:
        plain = {key: value.encode() for key, value in (obj.get("stringData") or {}).items()}
        return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()} | plain
    binary = {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}
    return {key: value.encode() for key, value in (obj.get("data") or {}).items()} | binary


def field_value(pod: Json, path: str) -> str:
    """The value of a fieldRef of the downward API, such as `metadata.annotations['key']` or `status.podIP`."""
    if match := re.fullmatch(r"metadata\.(annotations|labels)\['(.+)'\]", path):
        return str(find(pod, "metadata", match[1], match[2], default=""))
    value = find(pod, *path.split("."), default="")
    if isinstance(value, dict):
        return "\n".join(f'{key}="{item}"' for key, item in sorted(value.items()))
    return str(value)


def environment(sources: Sources, pod: Json, container: Json) -> dict[str, str]:
    namespace = pod["metadata"]["namespace"]
    result: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        for word, kind in (("configMapRef", CONFIG_MAP), ("secretRef", SECRET)):
            if reference := source.get(word):
                data = _data(sources, kind, namespace, reference["name"], bool(reference.get("optional")))
                result |= {source.get("prefix", "") + key: value.decode() for key, value in data.items()}
    for variable in container.get("env") or ():
        value = _variable(sources, pod, variable, result)
        if value is not None:
            result[variable["name"]] = value
    return result


def _variable(sources: Sources, pod: Json, variable: Json, before: Mapping[str, str]) -> str | None:
    origin = variable.get("valueFrom")
    if origin is None:
        return expand(variable.get("value", ""), before)
    if "fieldRef" in origin:
        return field_value(pod, origin["fieldRef"]["fieldPath"])
    for word, kind in (("configMapKeyRef", CONFIG_MAP), ("secretKeyRef", SECRET)):
        if reference := origin.get(word):
            optional = bool(reference.get("optional"))
            data = _data(sources, kind, pod["metadata"]["namespace"], reference["name"], optional)
            if reference["key"] not in data and not optional:
                told = f"couldn't find key {reference['key']} in {kind.kind} {reference['name']}"
                raise NotYet("CreateContainerConfigError", told)
            return data[reference["key"]].decode() if reference["key"] in data else None
    raise NotYet("CreateContainerConfigError", f"stele_local does not offer valueFrom {', '.join(origin)}")


def mounts(sources: Sources, pod: Json, container: Json, home: Path) -> dict[str, Path]:
    """Create and fill the pod's mounts. Returns the real folder or file of each mountPath. `home`: the pod's
    own folder.
    """
    declared = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    result: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in declared:
            raise NotYet("FailedMount", f"volume {mount['name']!r} is not among the pod's volumes")
        backing = _backing(sources, pod, declared[mount["name"]], home / "volumes" / mount["name"])
        if sub := mount.get("subPath"):
            backing = backing / sub
            if not backing.exists():
                backing.mkdir(parents=True)
        result[mount["mountPath"].rstrip("/")] = backing
    return result


def _backing(sources: Sources, pod: Json, volume: Json, own: Path) -> Path:
    namespace = pod["metadata"]["namespace"]
    if "persistentVolumeClaim" in volume:
        return _claimed(sources, namespace, volume["persistentVolumeClaim"]["claimName"])
    own.mkdir(parents=True, exist_ok=True)
    if "emptyDir" in volume:
        return own
    parts = volume["projected"]["sources"] if "projected" in volume else [volume]
    for part in parts:
        _write_files(own, _files(sources, pod, part))
    return own


def _claimed(sources: Sources, namespace: str, name: str) -> Path:
    claim = sources.registry.find(PVC, namespace, name)
    volume = sources.registry.find(PV, "", claim["spec"].get("volumeName", "")) if claim else None
    if volume is None or find(claim, "status", "phase") != "Bound":
        raise NotYet("FailedMount", f'persistentvolumeclaim "{name}" is not bound')
    if volumes.machine_of(volume) not in sources.machines:
        raise NotYet("FailedMount", f"volume {volume['metadata']['name']} is on no machine of this cluster")
    folder = volumes.folder(sources.machines, volume)
    if not folder.is_dir():
        path = volume["spec"]["local"]["path"]
        told = f'MountVolume.NewMounter initialization failed for volume "{volume["metadata"]["name"]}" : path "{path}" does not exist'
        raise NotYet("FailedMount", told)
    return folder


def _files(sources: Sources, pod: Json, part: Json) -> dict[str, bytes]:
    if "downwardAPI" in part:
        items = part["downwardAPI"].get("items") or ()
        return {item["path"]: field_value(pod, item["fieldRef"]["fieldPath"]).encode() for item in items}
    for word, kind, key in (("configMap", CONFIG_MAP, "name"), ("secret", SECRET, "secretName")):
        if word in part:
            source = part[word]
            name = source.get(key) or source["name"]
            data = _data(sources, kind, pod["metadata"]["namespace"], name, bool(source.get("optional")))
            if items := source.get("items"):
                return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
            return data
    raise NotYet(
        "FailedMount",
        f"stele_local does not offer volumes of type {', '.join(k for k in part if k != 'name')}",
    )


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def rewrite(text: str, mounted: Mapping[str, Path]) -> str:
    """`text` with every mountPath prefix replaced by its real folder; the longest mountPath wins."""
    for mount in sorted(mounted, key=len, reverse=True):
        pattern = rf"(^|[=:,\s]){re.escape(mount)}(?=/|$|[:,\s])"
        folder = str(mounted[mount]).replace("\\", r"\\")
        text = re.sub(pattern, rf"\g<1>{folder}", text)
    return text

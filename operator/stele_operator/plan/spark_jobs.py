"""Jobs whose work Spark does: their command, and the pods of its executors. Called by errand_jobs; pure.

Without executors, all tasks run in the Job's own pod, which has no token of Kubernetes. With executors, that
pod is Spark's driver in client mode. It creates the executors' pods with its ServiceAccount. Invariants: what
the operator sets takes precedence over the user's settings of Spark. An executor's pod has no token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stele_operator.api.backup import SparkSettings

Json = dict[str, Any]
_LOCAL = "local[*,4]"
"""All cores of the pod. A task that fails is tried up to four times."""
_KUBERNETES = "k8s://https://kubernetes.default.svc"
_PROGRAMS = {"create": "backup", "restore": "restore"}
_IP, _NAME, _TEMPLATE = "STELE_POD_IP", "STELE_POD_NAME", "STELE_EXECUTOR_POD"
TEMPLATE_FILE = "/tmp/executor.json"
"""Where `stele_spark.submit` writes the content of the variable STELE_EXECUTOR_POD."""
_TEMPORARY, _LOCAL_DIR = "tmp", "spark-local-dir-1"
"""The volume of /tmp in the Job's pod, and in an executor's: Spark mounts none itself if it finds one named like this."""


def by_spark(pod: Json, spark: SparkSettings, arguments: Sequence[str], namespace: str) -> None:
    """Make a pod of `manifest` run its command with spark-submit. `arguments`: those of `stele backup`, the
    command first.
    """
    (container,) = pod["containers"]
    ours = {"spark.ui.enabled": "false", "spark.local.dir": "/tmp"}
    if spark.executors:
        ours |= _on_kubernetes(pod, spark, namespace)
    else:
        ours |= {"spark.driver.host": "localhost", "spark.driver.bindAddress": "127.0.0.1"}
    container["image"] = spark.image
    container["command"] = ["python", "-m", "stele_spark.submit"]
    options = ["--master", _KUBERNETES if spark.executors else _LOCAL, *_settings({**spark.conf, **ours})]
    container["args"] = [*options, _PROGRAMS[arguments[0]], *arguments[1:]]


def _on_kubernetes(pod: Json, spark: SparkSettings, namespace: str) -> dict[str, str]:
    """Spark's settings for executors in pods of their own. Kubernetes replaces $(VARIABLE) in arguments by
    its value.
    """
    (container,) = pod["containers"]
    pod["automountServiceAccountToken"] = True
    executor = {key: container[key] for key in ("envFrom", "securityContext") if key in container}
    executor |= {
        "name": "executor",
        "command": ["python", "-m", "stele_spark.executor"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": _as_spark_names(container["volumeMounts"]),
    }
    kept = ("securityContext", "nodeSelector", "tolerations", "imagePullSecrets")
    template = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            **{key: pod[key] for key in kept if key in pod},
            "volumes": _as_spark_names(pod["volumes"]),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [executor],
        },
    }
    fields = {_IP: "status.podIP", _NAME: "metadata.name"}
    container["env"] += [
        *({"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}} for n, path in fields.items()),
        {"name": _TEMPLATE, "value": json.dumps(template, sort_keys=True)},
    ]
    return {
        "spark.submit.deployMode": "client",
        "spark.executor.instances": str(spark.executors),
        "spark.driver.host": f"$({_IP})",
        "spark.driver.bindAddress": f"$({_IP})",  # executors are told this one
        "spark.kubernetes.namespace": namespace,
        "spark.kubernetes.driver.pod.name": f"$({_NAME})",
        "spark.kubernetes.container.image": spark.image,
        "spark.kubernetes.executor.podTemplateFile": TEMPLATE_FILE,
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
        "spark.kubernetes.executor.disableConfigMap": "true",
    }


def _as_spark_names(parts: Sequence[Json]) -> list[Json]:
    """Volumes or mounts, with the volume of /tmp renamed as Spark names its own. Otherwise Spark would mount
    a second one at /tmp, which Kubernetes refuses.
    """
    return [{**part, "name": _LOCAL_DIR} if part["name"] == _TEMPORARY else part for part in parts]


def _settings(conf: Mapping[str, str]) -> list[str]:
    return [word for key, value in sorted(conf.items()) for word in ("--conf", f"{key}={value}")]

"""The scenario of definitions whose defaults break their own rules: the API server tries every rule on a default as it
is written, as self and as oldSelf, before it fills in what lies below."""

from __future__ import annotations

from typing import Any

from tests.kube_contract.crd import GROUP

CRATES = f"crates.{GROUP}"


def crate(**spec: Any) -> dict[str, Any]:
    """A definition whose spec has these properties."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRATES},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "Crate", "listKind": "CrateList", "plural": "crates", "singular": "crate"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": {"type": "object", "properties": spec}},
                        }
                    },
                }
            ],
        },
    }


def _box(rule: str, message: str) -> dict[str, Any]:
    return {
        "type": "object",
        "default": {},
        "properties": {"size": {"type": "integer", "default": 1}},
        "x-kubernetes-validations": [{"rule": rule, "message": message}],
    }


GROWS = "size can only grow"
ASSUMES_A_FIELD = crate(box=_box("self.size >= oldSelf.size", GROWS))
BROKEN_BY_ITS_DEFAULT = crate(
    odd={
        "type": "integer",
        "default": 2,
        "x-kubernetes-validations": [{"rule": "self % 2 == 1", "message": "odd must be odd"}],
    },
    outer={"type": "object", "properties": {"box": _box("self.size > 0", "size must be more than nothing")}},
)
GUARDED = crate(box=_box("!has(self.size) || !has(oldSelf.size) || self.size >= oldSelf.size", GROWS))

"""The sample kind of the recordings: a CRD with every schema feature that stele_local offers."""

from __future__ import annotations

from typing import Any

GROUP = "contract.stele.dev"
NAME = f"shelves.{GROUP}"
BASE = f"/apis/{GROUP}/v1"

_SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["n"],
    "x-kubernetes-validations": [
        {
            "rule": "self.n.replicas < 10 || has(self.big)",
            "message": "too many without big",
            "fieldPath": ".n.replicas",
        },
        {"rule": "!has(self.big) || self.big == (self.n.replicas > 3)"},
        {
            "rule": "!has(self.list) || self.list.all(i, i.name != 'forbidden')",
            "messageExpression": "'no forbidden names among ' + (self.list.size() > 1 ? 'these' : 'this')",
            "reason": "FieldValueForbidden",
        },
        {"rule": "!has(oldSelf.mode) || has(self.mode)", "message": "mode cannot be taken back"},
    ],
    "properties": {
        "big": {"type": "boolean"},
        "size": {
            "type": "string",
            "pattern": "^[0-9]+(Gi|Mi)$",
            "maxLength": 12,
            "x-kubernetes-validations": [
                {"rule": "quantity(self).compareTo(quantity(oldSelf)) >= 0", "message": "size may only grow"}
            ],
        },
        "fixed": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}},
            "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "fixed is immutable"}],
        },
        "count": {
            "type": "integer",
            "x-kubernetes-validations": [{"rule": "self % 2 == 1", "message": "count must be odd"}],
        },
        "port": {"x-kubernetes-int-or-string": True},
        "mode": {"type": "string", "enum": ["A", "B"], "default": "A"},
        "note": {"type": "string", "nullable": True, "maxLength": 5, "minLength": 2},
        "list": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "v": {
                        "type": "integer",
                        "x-kubernetes-validations": [{"rule": "self >= oldSelf", "message": "v only rises"}],
                    },
                },
            },
        },
        "set": {"type": "array", "maxItems": 5, "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
        "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "labels": {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "string"}},
        "ratio": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1},
        "at": {"type": "string", "format": "date-time"},
        "step": {"type": "integer", "multipleOf": 5},
        "n": {
            "type": "object",
            "properties": {
                "replicas": {"type": "integer", "format": "int32", "enum": [1, 3, 5, 20], "default": 3},
                "max": {"type": "integer", "minimum": 1, "maximum": 9},
            },
        },
    },
}

_STATUS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "replicas": {"type": "integer"},
        "selector": {"type": "string"},
        "phase": {"type": "string", "enum": ["Up", "Down"]},
        "conditions": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"type": "string"}, "status": {"type": "string"}},
            },
        },
    },
}

CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": NAME},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "shelves", "singular": "shelf", "kind": "Shelf", "shortNames": ["sh"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.n.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "additionalPrinterColumns": [
                    {"name": "Reps", "type": "integer", "jsonPath": ".spec.n.replicas"},
                    {
                        "name": "Ready",
                        "type": "string",
                        "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
                    },
                    {"name": "Items", "type": "string", "jsonPath": ".spec.list[*].name", "priority": 1},
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "x-kubernetes-validations": [
                            {
                                "rule": "self.metadata.name.size() <= 12",
                                "message": "name must be at most 12 characters",
                            }
                        ],
                        "properties": {"spec": _SPEC, "status": _STATUS},
                    }
                },
            }
        ],
    },
}


def shelf(name: str, spec: Any, **metadata: Any) -> dict[str, Any]:
    """A Shelf as a client sends it."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Shelf",
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }

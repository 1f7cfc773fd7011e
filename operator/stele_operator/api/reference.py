"""Writes docs/resources.md from the definitions: every field that a user or the operator writes. Called by
generate.py; pure.

Invariant: each field of the schema has a line with its description. Only the parts of Kubernetes' own types
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stele_operator.api.definitions import definitions

Json = dict[str, Any]

_AS_IN_PODS = ("affinity", "topologySpreadConstraints")
"""Fields whose parts are left out. They would take hundreds of lines, and Kubernetes documents them."""

_HEAD = """# The resources, field by field

Written by `python -m stele_operator.api.generate`; do not edit. On a real Kubernetes `kubectl explain tc.spec.nodes` prints the same.
Examples: [examples/cluster.yaml](../examples/cluster.yaml), [examples/dedicated.yaml](../examples/dedicated.yaml),
[examples/flights.yaml](../examples/flights.yaml), [examples/months.yaml](../examples/months.yaml),
[examples/backup.yaml](../examples/backup.yaml), [examples/nightly.yaml](../examples/nightly.yaml), [examples/restore.yaml](../examples/restore.yaml). `[]`: each item of a list; bold: required. What conditions, steps and fates mean: [metrics.md](metrics.md), [healing.md](healing.md),
[failures.md](failures.md).
"""


def reference() -> str:
    """The text of docs/resources.md."""
    return "\n".join([_HEAD, *(_kind(definition) for _, definition in sorted(definitions().items()))])


def _kind(definition: Json) -> str:
    names = definition["spec"]["names"]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    short = ", ".join(f"`{name}`" for name in names.get("shortNames", ()))
    lines = [f"## {names['kind']}", "", f"{schema['description']} Short name: {short}.", ""]
    for part, columns in (("spec", ("field", "type", "default", "")), ("status", ("field", "type", ""))):
        lines += [_row(columns), _row(["---"] * len(columns))]
        for path, field, required in _fields(schema["properties"][part], f"{part}."):
            name = f"**`{path}`**" if required else f"`{path}`"
            default = [_default(field)] if part == "spec" else []
            lines.append(_row([name, _type(field), *default, field.get("description", "")]))
        lines.append("")
    return "\n".join(lines)


def _fields(schema: Json, prefix: str) -> Iterator[tuple[str, Json, bool]]:
    """The path, the schema, and whether it is required, of each field below; outer fields first."""
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield path, field, prefix.startswith("spec") and name in schema.get("required", ())
        if name in _AS_IN_PODS:
            continue
        if field.get("type") == "array":
            yield from _fields(field["items"], f"{path}[].")
        elif "x-kubernetes-preserve-unknown-fields" not in field:
            yield from _fields(field, f"{path}.")


def _type(field: Json) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("x-kubernetes-int-or-string"):
        return "quantity" if "pattern" in field else "integer or string"
    return str(field.get("type", "any"))


def _default(field: Json) -> str:
    value = field.get("default")
    if value is None or value == {} or value == []:  # its fields have their own defaults
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _row(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

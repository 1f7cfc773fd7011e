"""The API server's refusals. Owns: the `Status` body, and the messages that do not depend on a schema.

Refusals are raised anywhere below `http`, which alone turns them into responses. Messages are those of a real
API server (tests/kube_contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType

Json = dict[str, Any]
Path = NewType("Path", str)


@dataclass(frozen=True, slots=True)
class Cause:
    """One fault of an object. `field` is a path as the API server writes it (`spec.list[0].name`)."""

    reason: str
    message: str
    field: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiError(Exception):
    """A refusal, with its HTTP code and the reason by which clients recognize it."""

    def __init__(self, code: int, reason: str, message: str, details: Json | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def body(self) -> Json:
        body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        if self.reason:
            body["reason"] = self.reason
        if self.details is not None:
            body["details"] = self.details
        return body


def _details(name: str, group: str, kind: str, **more: Any) -> Json:
    details: Json = {"name": name, "group": group, "kind": kind, **more}
    return {key: value for key, value in details.items() if value}


def _qualified(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(plural: str, group: str, name: str) -> ApiError:
    message = f'{_qualified(plural, group)} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(name, group, plural))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(plural: str, group: str, name: str) -> ApiError:
    message = f'{_qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(name, group, plural))


def conflict(kind: str, group: str, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {_qualified(kind, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(name, group, kind))


def modified(plural: str, group: str, name: str) -> ApiError:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(plural, group, name, why)


def invalid(kind: str, group: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """The refusal of an object, with all its faults."""
    told = list(
        dict.fromkeys(str(cause) for cause in causes)
    )  # the message names each fault once; the list of causes has all
    sentence = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    message = f'{_qualified(kind, group)} "{name}" is invalid: {sentence}'
    listed = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    return ApiError(422, "Invalid", message, _details(name, group, kind, causes=listed))


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def no_kubelet(machine: str, address: str, path: str) -> ApiError:
    """The refusal for a pod whose machine is off: the API server cannot ask the kubelet there."""
    why = f"dial tcp {address}:10250: connect: no route to host"
    return ApiError(500, "", f'Get "https://{machine}:10250{path}": {why}')


def forbidden(plural: str, group: str, name: str, why: str, **more: Any) -> ApiError:
    message = f'{_qualified(plural, group)} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, _details(name, group, plural, **more))


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def not_offered(what: str) -> ApiError:
    """The refusal (501) of a feature that stele_local does not implement."""
    return ApiError(501, "NotImplemented", f"stele_local does not offer {what}; use a real Kubernetes for it")


def media_type(accepted: Sequence[str]) -> ApiError:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return ApiError(415, "UnsupportedMediaType", message)

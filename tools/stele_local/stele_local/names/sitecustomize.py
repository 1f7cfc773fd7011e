"""Cluster DNS without root: Python resolves cluster names from a file. Only pods' processes have this module
on their PYTHONPATH.

STELE_LOCAL_HOSTS names a JSON file {name: [address, ...]} that stele_local keeps up to date.
STELE_LOCAL_NAMESPACE is the pod's namespace, for short names. A name below `svc.cluster.local` that is not in
the file does not exist. The system resolves all other names. Only Python programs see cluster names.
"""

import json
import os
import socket
from typing import Any

DOMAIN = "cluster.local"
_system_getaddrinfo = socket.getaddrinfo
_hosts_path = os.environ.get("STELE_LOCAL_HOSTS", "")
_namespace = os.environ.get("STELE_LOCAL_NAMESPACE", "default")
_read: "tuple[int, dict[str, list[str]]]" = (0, {})


def _hosts() -> "dict[str, list[str]]":
    global _read
    changed = os.stat(_hosts_path).st_mtime_ns
    if changed != _read[0]:
        with open(_hosts_path, encoding="utf-8") as file:
            _read = (changed, json.load(file))
    return _read[1]


def addresses(name: str) -> "list[str] | None":
    """Addresses of a cluster name; None if the name is not a cluster name."""
    name = name.rstrip(".").lower()
    hosts = _hosts()
    for suffix in ("", f".{_namespace}.svc.{DOMAIN}", f".svc.{DOMAIN}", f".{DOMAIN}"):
        if name + suffix in hosts:
            return hosts[name + suffix]
    return [] if name.endswith((f".{DOMAIN}", ".svc")) else None


def _getaddrinfo(
    host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
) -> "list[Any]":
    text = host.decode() if isinstance(host, bytes) else host
    found = addresses(text) if text else None
    if found is None:
        return _system_getaddrinfo(host, port, family, type, proto, flags)
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [
        row for address in found for row in _system_getaddrinfo(address, port, family, type, proto, flags)
    ]


if _hosts_path:
    socket.getaddrinfo = _getaddrinfo

"""Times between Kubernetes' text and seconds since 1970. Pure; reads no clock."""

from __future__ import annotations

import datetime


def seconds_of(timestamp: str | None) -> float:
    """Seconds since 1970 of a Kubernetes timestamp; 0 for none."""
    if not timestamp:
        return 0.0
    return datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def timestamp(now_s: float) -> str:
    """A time in Kubernetes' format."""
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Times between Kubernetes' text and seconds since 1970. Pure; reads no clock."""

from __future__ import annotations

import datetime


def seconds_of(timestamp: str | None) -> float:
    """A Kubernetes timestamp as seconds since 1970; 0 if there is none."""
    if not timestamp:
        return 0.0
    return datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def timestamp(now_s: float) -> str:
    """Seconds since 1970 as a timestamp in Kubernetes' format."""
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Both ends of most connections are in the test's own process: that it stands still is no silence of either."""

from __future__ import annotations

import pytest

from stele.rpc import channels, connection, server

PATIENT_MS = 60_000
_WAITS = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")

Options = tuple[tuple[str, int], ...]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection ends because the process stood still for seconds. Tests of silence set times of their own."""

    def waiting(options: Options) -> Options:
        return tuple((name, PATIENT_MS if name.endswith(_WAITS) else value) for name, value in options)

    monkeypatch.setattr(connection, "KEEPALIVE_TIME_MS", PATIENT_MS)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", waiting(channels.CHANNEL_OPTIONS))
    monkeypatch.setattr(server, "SERVER_OPTIONS", waiting(server.SERVER_OPTIONS))

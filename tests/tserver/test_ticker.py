"""The replicas' time: that of the machine, but never far in one step."""

from __future__ import annotations

from stele.tserver.ticker import STEP_MS, ReplicaClock


def test_after_a_stall_time_goes_one_step_at_a_tick() -> None:
    """What came in meanwhile is read first: a stall of ours is no silence of others."""
    real = [1_000]
    clock = ReplicaClock(lambda: real[0] * 1_000_000)
    began = clock.now_ms()
    real[0] += 5_000
    assert clock.now_ms() == began + STEP_MS
    assert clock.tick() == 5_000
    assert clock.now_ms() == began + STEP_MS
    real[0] += 25
    assert clock.tick() == 25
    assert clock.now_ms() == began + STEP_MS + 25

"""What holds for all tests: examples of hypothesis take as long as they take, on machines of any speed, and a run that
is told to end (SIGTERM, as `timeout` and CI send it) stops what it started, as one that is interrupted does."""

import signal
from types import FrameType

from hypothesis import HealthCheck, settings

settings.register_profile("stele", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stele")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _interrupt)

"""What holds for all tests: examples of hypothesis take as long as they take, on machines of any speed, and a run that
is told to end (SIGTERM, as `timeout` and CI send it) stops what it started, as one that is interrupted does."""

import os
import signal
from types import FrameType

from hypothesis import HealthCheck, settings

settings.register_profile("stele", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stele")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Spark starts Java by a fork that closes all files before it becomes Java, and gRPC's threads, which its fork handlers start
# again in the child, abort it there (docs/limits.md). Nothing here forks and goes on.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

signal.signal(signal.SIGTERM, _interrupt)

"""The node's wall clock, and whether it agrees with most clocks of the cluster, which heartbeats bring.

Masters' answers are kept as offsets from this machine's monotonic clock, which neither an administrator nor
NTP sets. So a step of the wall clock is seen at the first reading after it, before the reading is used.

Invariant: a reading counts as wrong only if most clocks agreed on another time within KEPT_US. A node that
hears nobody continues. So does a node if no majority of the masters' clocks agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stele.model.bounds import TIME_MAX, UNCOMMITTED_AHEAD_MAX_US
from stele.model.clock import CLOCK_OFF_MAX_US, agreed, from_physical_us, utc
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2

KEPT_US = 3_600_000_000
"""How long an answer counts. Monotonic clocks drift by less than a third of a second in an hour."""

FRESH_US = 10_000_000
"""An answer that is this much older than the newest one does not count: all clocks may have been set since.
"""

SLOW_US = 1_000_000
"""An answer after a longer round trip is not used: it may be wrong by half of that time."""


def monotonic_us() -> int:
    """Microseconds of a clock that never goes back and also counts while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


def wall_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000


@dataclass(slots=True)
class _Heard:
    """A master's answers. A base is µs since 1970 less µs of this machine's monotonic clock. `at_us` is a
    time of the monotonic clock.
    """

    clock_id: int
    shift_us: int  # the master's monotonic clock less ours
    base_us: int  # its own wall clock
    at_us: int
    agreed_base_us: int | None = None  # what most clocks that it has heard say
    agreed_at_us: int = 0


class WallClock:
    """Reads the wall clock and judges its readings. `read()` gives µs since 1970. `node`: its node id, for
    messages.
    """

    def __init__(
        self,
        node: str,
        wall: Callable[[], int] = wall_us,
        monotonic: Callable[[], int] = monotonic_us,
    ) -> None:
        self._node = node
        self.read = wall
        self.monotonic_us = monotonic
        self._heard: dict[str, _Heard] = {}
        self._base_us: int | None = None  # what most clocks say
        self._until_us = 0

    @property
    def base_us(self) -> int:
        """This node's wall clock less its monotonic one."""
        return self.read() - self.monotonic_us()

    @property
    def ahead_us(self) -> int | None:
        """How far the wall clock is ahead of what most clocks say; None if unknown."""
        now_us = self.monotonic_us()
        if self._base_us is None or now_us > self._until_us:
            return None
        return self.read() - now_us - self._base_us

    @property
    def latest_time(self) -> int:
        """The highest hybrid time that an uncommitted entry may have."""
        now_us = self.monotonic_us()
        if self._base_us is None or now_us > self._until_us:
            return TIME_MAX
        return min(from_physical_us(now_us + self._base_us + UNCOMMITTED_AHEAD_MAX_US), TIME_MAX)

    def fault(self, reading_us: int) -> str:
        """What is wrong with a reading that was just taken, as text; "" if nothing is."""
        base_us = self._base_us
        if base_us is None:
            return ""
        now_us = self.monotonic_us()
        if -CLOCK_OFF_MAX_US <= reading_us - now_us - base_us <= CLOCK_OFF_MAX_US or now_us > self._until_us:
            return ""
        return (
            f"the clock of node {self._node[:8]} says {utc(reading_us)}, but most clocks of its cluster say "
            f"{utc(base_us + now_us)}; correct it with NTP"
        )

    def tell(self, request: master_pb2.TSHeartbeatRequest, master: str) -> None:
        """Add this clock's readings to a heartbeat for `master`, in a form that this master can compare."""
        heard = self._heard.get(master)
        if heard is not None:
            request.clock_id = heard.clock_id
            request.wall_base_us = self.base_us - heard.shift_us
        ahead_us = self.ahead_us
        if ahead_us is not None:
            request.wall_ahead_us = ahead_us

    def answered(self, response: master_pb2.TSHeartbeatResponse, sent_us: int) -> None:
        """Take in the answer to a heartbeat. `sent_us`: when the heartbeat was sent, by the monotonic clock."""
        master = id_from_pb(response.node_id)
        now_us = self.monotonic_us()
        if response.clock_id and now_us - sent_us <= SLOW_US:
            middle_us = (sent_us + now_us) // 2
            known = self._heard.get(master)
            heard = _Heard(
                response.clock_id, response.clock_us - middle_us, response.wall_us - middle_us, middle_us
            )
            if response.HasField("wall_agreed_us"):
                heard.agreed_base_us = response.wall_agreed_us - middle_us
                heard.agreed_at_us = middle_us
            elif known is not None:
                heard.agreed_base_us, heard.agreed_at_us = known.agreed_base_us, known.agreed_at_us
            self._heard[master] = heard
            self._judge(now_us)

    def _judge(self, now_us: int) -> None:
        """Work out what most clocks say: from the masters that have heard enough clocks, else from the
        masters' clocks and ours."""
        self._heard = {
            master: heard for master, heard in self._heard.items() if heard.at_us >= now_us - KEPT_US
        }
        told = [
            (heard.agreed_at_us, heard.agreed_base_us)
            for heard in self._heard.values()
            if heard.agreed_base_us is not None and heard.agreed_at_us >= now_us - KEPT_US
        ]
        clocks = told or [(h.at_us, h.base_us) for master, h in self._heard.items() if master != self._node]
        if not clocks:
            return
        newest_us = max(at_us for at_us, _ in clocks)
        bases = [base_us for at_us, base_us in clocks if at_us >= newest_us - FRESH_US]
        base_us = agreed(bases if told else [*bases, self.base_us])
        if base_us is not None:
            self._base_us, self._until_us = base_us, newest_us + KEPT_US

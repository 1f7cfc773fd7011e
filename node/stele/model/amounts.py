"""Numbers of bytes and lengths of time in words, for people. Pure; imports nothing."""

from __future__ import annotations


def byte_size(count: int) -> str:
    """A number of bytes in MiB or GiB; exact if it is below 1 MiB."""
    if count < 2**20:
        return f"{count:,} bytes"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """A time as text, in at most two units, such as "1 d 3 h". It is rounded to seconds, at least "1 s"."""
    left = max(1, round(seconds))
    parts: list[str] = []
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if left >= unit and len(parts) < 2:
            parts.append(f"{left // unit} {name}")
            left %= unit
    return " ".join(parts)


def plural(count: int, noun: str) -> str:
    """The number with its noun: "1 replica", "2,000 replicas"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def refused_of(refused: int, written: int, verb: str = "refused") -> str:
    """How many of the rows of a write failed: "1 of 3 rows was refused"."""
    return f"{refused:,} of {plural(refused + written, 'row')} {'was' if refused == 1 else 'were'} {verb}"

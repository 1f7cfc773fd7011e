"""Spoils the valid inputs of parsers and feeds them. Knows no parser of its own. Run in this process, no sockets.

Invariant: a spoiled input ends in a value or in a documented error, soon, without much memory, and never in another exception.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stele.model.errors import Code, InvariantViolation, SteleError
from tests.fuzz.draw import Draw

SLOW_S = 5.0
"""An input of some kilobytes that takes longer holds a node's loop: it is a finding."""

SPIKE_BYTES = 256 << 20
"""An input of some kilobytes that takes more memory than this at once is a finding, too."""

Parse = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Parser:
    """`seeds`: valid inputs. `allowed`: errors it documents beside `SteleError`s."""

    name: str
    seeds: Sequence[bytes]
    parse: Parse
    allowed: tuple[type[Exception], ...] = ()
    json_from: int | None = None
    """Where JSON begins in a seed: trees are spoiled, too, not only bytes. None: there is none."""
    reseal: Callable[[bytes], bytes] | None = None
    """Puts the checksum right that a spoiled body needs to be looked at, as whoever made it up would."""
    costly: bool = False
    """An input takes tens of milliseconds."""
    words: Sequence[bytes] = ()
    """What means something in its language. They are put anywhere between the words of a seed."""


def check_seeds(parsers: Sequence[Parser]) -> None:
    """Every seed must be what its parser takes: a fault behind a seed that is refused would never be seen."""
    for parser in parsers:
        for seed in parser.seeds:
            parser.parse(seed if parser.reseal is None else parser.reseal(seed))


class Finding(Exception):
    """An input that ended in something else than a value or a documented error."""


def hunt(
    draw: Draw, parsers: Sequence[Parser], *, rounds: int | None = None, until_s: float = math.inf
) -> dict[str, int]:
    """Spoil and parse for so many rounds, or until the time (of `time.monotonic`) has come; how many inputs each parser got.

    Raises:
        Finding: with the parser and the input, as a line of Python.
    """
    counts = dict.fromkeys((p.name for p in parsers), 0)
    played = 0
    while played != rounds and time.monotonic() < until_s:
        for parser in parsers:
            for data in _inputs(draw, parser):
                _try(parser, data)
                counts[parser.name] += 1
        played += 1
    return counts


def _inputs(draw: Draw, parser: Parser) -> Iterator[bytes]:
    seed = draw.rng.choice(parser.seeds)
    if parser.json_from is not None:
        tree = draw.json_tree(json.loads(seed[parser.json_from :]))
        body = seed[: parser.json_from] + json.dumps(tree).encode()
        yield from _resealed(parser, body)
        yield from _resealed(parser, seed[: parser.json_from] + draw.deep_json(tree))
    if parser.words:
        yield from _resealed(parser, draw.with_words(seed, parser.words))
    spoiled = draw.spoil(seed)
    yield from _resealed(parser, spoiled)
    if parser.reseal is not None:
        yield draw.spoil(parser.reseal(seed))
    if draw.rng.random() < 0.05:
        yield draw.rng.randbytes(draw.rng.randrange(300))


def _resealed(parser: Parser, body: bytes) -> Iterator[bytes]:
    yield body if parser.reseal is None else parser.reseal(body)


def _try(parser: Parser, data: bytes) -> None:
    began, peak = time.thread_time(), _peak_bytes()
    try:
        parser.parse(data)
    except InvariantViolation as exc:
        raise Finding(f"{parser.name}: {exc}; input {data!r}") from exc
    except SteleError as exc:
        if exc.code is Code.INTERNAL:
            raise Finding(f"{parser.name}: {exc}; input {data!r}") from exc
    except parser.allowed:
        pass
    except Exception as exc:
        raise Finding(f"{parser.name}: {exc!r}; input {data!r}") from exc
    if _peak_bytes() - peak > SPIKE_BYTES:
        raise Finding(f"{parser.name}: much memory for {len(data)} bytes; input {data[:2_000]!r}")
    took = time.thread_time() - began
    if took > SLOW_S:
        raise Finding(f"{parser.name}: {took:.1f} s for {len(data)} bytes; input {data[:2_000]!r}")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""`python -m tests.power --rounds 20 [--seed N] [--seconds 20]`: real nodes, a power cut at any file call; do they come back?

A round records what a cluster writes under load, and draws crash states from it: a call, and what of all that was not synced
by then is there. Each member starts alone on each state and must hold all it had said; on one state in some the whole cluster
starts, and clients must find all they were told. Clients send again what they had no answer for, and it is done once. On one
state in some the members' starts are recorded as well, and the power goes again in the midst of them. The seed of the next
round is one higher.

What nodes write is another thing each time, so the recording is kept where something is wrong: `--recording FILE`, with the
same seed, draws the same states from it. Where it was found in a start, FILE is what was recorded of that one.

Exit status 1 if something is; then the seed, the state and the folder with it are printed.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from stele.rpc.logging import setup
from tests.power import checks
from tests.power.disk import ROOT, Disk, Names, Operation, Order, Sync, Tree
from tests.power.recorder import DEVICE, Recorder, unavailable
from tests.power.story import Story
from tests.power.workload import small

_HOME = Path(__file__).resolve().parents[2]
_ROOM_BYTES = 1 << 30
_AGAIN_STATES = 8
"""Crash states of each recorded start."""


class Failure(Exception):
    """What a power cut left is no start."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was there before, what was written, call by call, and what was heard meanwhile."""

    before: Tree
    operations: list[Operation]
    story: Story


@dataclass(frozen=True, slots=True)
class Judged:
    """How many states there were; of them, those of recorded starts; blocks that clients had no answer for."""

    states: int = 0
    again: int = 0
    resent: int = 0

    def __add__(self, other: Judged) -> Judged:
        return Judged(self.states + other.states, self.again + other.again, self.resent + other.resent)


def _serve(before: Tree, mounted: Path, module: str, *arguments: str) -> list[Operation]:
    """Run a module that mounts `mounted`; what it wrote there.

    Raises:
        Failure: it ended by itself.
    """
    mounted.mkdir(parents=True)
    log = mounted.with_suffix(".log")
    fd, recorder = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC), Recorder(before)
    command = [sys.executable, "-X", "faulthandler", "-m", module, str(fd), str(mounted), *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=_HOME, pass_fds=[fd], stdout=output, stderr=output) as process,
    ):
        try:
            recorder.serve(fd, lambda: process.poll() is not None)
        finally:
            process.kill()
            os.close(fd)  # before it is waited for: whoever waits for an answer has none now
    if process.returncode:
        raise Failure(
            f"the nodes that were recorded ended by themselves ({process.returncode}): {log.read_text()[-3000:]}"
        )
    return recorder.operations


def record(folder: Path, seed: int, seconds: float) -> Recording:
    """Let a cluster of its own write for some seconds, and record it.

    Raises:
        Failure: it ended by itself.
    """
    before, told = Tree.empty(), folder / "story"
    operations = _serve(
        before, folder / "recorded", "tests.power.workload", str(seed), str(seconds), str(told)
    )
    return Recording(before, operations, pickle.loads(told.read_bytes()))


def record_start(folder: Path, before: Tree, story: Story) -> Recording:
    """Let the members of a cluster start on what a power cut left, and record it.

    Raises:
        Failure: it ended by itself, or what it left was no start.
    """
    earlier, told = folder / "story-before", folder / "story-after"
    earlier.write_bytes(pickle.dumps(story))
    shutil.rmtree(folder / "started", ignore_errors=True)
    operations = _serve(before, folder / "started", "tests.power.recovery", str(earlier), str(told))
    after, faults = pickle.loads(told.read_bytes())
    if faults:
        raise Failure("\n".join(faults))
    return Recording(before, operations, after)


def draw(
    operations: list[Operation], ready_s: float, rng: random.Random, states: int
) -> list[tuple[int, int]]:
    """(how many calls were made, seed of the rest), by number: most next to a sync or a change of names."""
    first = next(at for at, operation in enumerate(operations, 1) if operation.at_s > ready_s)
    syncs = [at for at in range(first, len(operations)) if isinstance(operations[at], Sync)]
    names = [at for at in range(first, len(operations)) if isinstance(operations[at], Names)]
    drawn = []
    for _ in range(states):
        kind = rng.random()
        if kind < 0.35:
            at = rng.choice(syncs) + rng.randint(0, 1)
        elif kind < 0.8:
            at = rng.choice(names) + rng.randint(1, 4)
        else:
            at = rng.randrange(first, len(operations))
        drawn.append((min(at, len(operations)), rng.randrange(1 << 31)))
    return sorted(drawn)


def _place(folder: Path) -> Path:
    """Where states are laid: in memory, if there is room, as each start syncs a lot."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _ROOM_BYTES
    return Path(tempfile.mkdtemp(prefix="stele-power-", dir=memory)) if roomy else folder


def judge(
    folder: Path, recording: Recording, seed: int, states: int, whole: int, again: int, until_s: float
) -> Judged:
    """Start on crash states of a recording until their number or the time is up; on each `whole`-th the cluster, too, and in the
    midst of each `again`-th such number the power goes again. 0: never.

    Raises:
        Failure: with what was wrong.
    """
    story, disk, made, judged = recording.story, Disk(recording.before), 0, Judged()
    drawn = draw(recording.operations, story.ready_s, random.Random(f"power/{seed}/states"), states)
    for at, chance in drawn:
        if time.monotonic() > until_s:
            break
        for operation in recording.operations[made:at]:
            disk.step(operation)
        made = at
        by_s = recording.operations[at - 1].at_s
        order = (*Order,)[chance % len(Order)]
        tree, so_far = disk.crash(random.Random(chance), order), story.until(by_s)
        number = judged.states
        place = _place(folder)
        try:
            faults = _start(place, tree, so_far, also_whole=bool(whole) and number % whole == whole - 1)
        finally:
            if place != folder:
                shutil.rmtree(place)
        unanswered = sum(map(len, so_far.unanswered().values()))
        judged += Judged(states=1, resent=unanswered)
        where = (
            f"the power went after call {at} of {len(recording.operations)}, {by_s - story.ready_s:.3f} s, and of "
            f"pending names it kept {order.value}; state {judged.states}"
        )
        try:
            if faults:
                raise Failure("\n".join(faults))
            if again and number % again == again // 2:
                judged += _judge_start(folder, tree, so_far, seed, until_s)
        except Failure as exc:
            _lay(folder, tree)
            raise Failure(f"{where}:\n{exc}") from exc
    return judged


def _judge_start(folder: Path, tree: Tree, story: Story, seed: int, until_s: float) -> Judged:
    """The power goes again while the members start on a state.

    Raises:
        Failure: with what was wrong.
    """
    inside = folder / "again"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    recorded = record_start(inside, tree, story)
    try:
        found = judge(inside, recorded, seed, _AGAIN_STATES, 0, 0, until_s)
    except Failure as exc:
        (inside / "recording").write_bytes(pickle.dumps(recorded))
        raise Failure(f"they started, and {exc}\nthat start is recorded in {inside}") from exc
    return Judged(again=found.states, resent=found.resent)


def _lay(folder: Path, tree: Tree) -> Path:
    """Make a state the disk of all members."""
    directory = folder / "state"
    shutil.rmtree(directory, ignore_errors=True)
    tree.write_to(directory, ROOT)
    return directory


def _start(folder: Path, tree: Tree, story: Story, *, also_whole: bool) -> list[str]:
    directory = _lay(folder, tree)
    alone, together = story.until(math.inf), story.until(math.inf)
    faults = []
    for name in story.ids:
        found = asyncio.run(checks.member(directory / name, name, alone))
        faults += [f"{name}: {fault}" for fault in found]
    if also_whole and not faults:
        _lay(folder, tree)
        with small():
            faults += asyncio.run(checks.cluster(directory, together))
    return faults


def run(
    folder: Path,
    seed: int,
    *,
    seconds: float,
    states: int,
    whole: int,
    again: int,
    judged_s: float,
    recording: Path | None = None,
) -> str:
    """One round of a seed; a line about it.

    Raises:
        Failure: with the seed and what was wrong.
    """
    kept = recording or folder / "recording"
    try:
        if recording is None:
            kept.write_bytes(pickle.dumps(record(folder, seed, seconds)))
        found: Recording = pickle.loads(kept.read_bytes())
        judged = judge(folder, found, seed, states, whole, again, time.monotonic() + judged_s)
    except Failure as exc:
        raise Failure(f"FAILED with seed {seed}: {exc}\nthe state and the recording are in {folder}") from exc
    deeds = [deed for history in found.story.rows.values() for deed in history]
    return (
        f"seed {seed}: {len(found.operations)} calls, {len(deeds)} writes of rows, {len(found.story.promises)} promises, "
        f"{judged.states} states, {judged.again} of starts; {judged.resent} blocks sent again"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=20, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="How long each recording lasts.")
@click.option("--states", default=300, show_default=True, help="Crash states of each recording.")
@click.option(
    "--whole", default=15, show_default=True, help="On each so manyth the whole cluster starts, too."
)
@click.option(
    "--again", default=30, show_default=True, help="On each so manyth the power goes again in the starts."
)
@click.option("--seed", type=int, help="Of the first round; drawn if absent.")
@click.option(
    "--recording", type=click.Path(path_type=Path), help="Draw the states of one round from this one."
)
def main(
    rounds: int,
    seconds: float,
    states: int,
    whole: int,
    again: int,
    seed: int | None,
    recording: Path | None,
) -> None:
    """Cut the power of real nodes at moments that seeds draw, as weakly as a file system may keep what is not synced."""
    setup(level="critical")
    if (why_not := unavailable()) and recording is None:
        raise click.ClickException(why_not)
    first = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    seeds = range(first, first + (rounds if recording is None else 1))
    failed = []
    for number in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"stele-power-{number}-"))
        try:
            line = run(
                folder,
                number,
                seconds=seconds,
                states=states,
                whole=whole,
                again=again,
                judged_s=3600.0,
                recording=recording,
            )
            click.echo(line)
            shutil.rmtree(folder)
        except Failure as exc:
            click.echo(str(exc))
            failed.append(number)
    which = f": seeds {failed}" if failed else ""
    click.echo(f"{len(seeds) - len(failed)} passed, {len(failed)} failed{which}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

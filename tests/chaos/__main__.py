"""`python -m tests.chaos --rounds 20 [--seed N]`: kill -9 of the operator, a master or a node, also in mid-heal.

Each round draws what happens; some rounds first lose a whole machine for good and strike while it is healed. After each
round the cluster must be whole again unaided; at the end every acknowledged row must be there, once and unchanged.

Exit status 1 if it is not; then the seed, the round and the folder with all logs are printed.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from examples.demo import flights
from examples.demo.__main__ import last_json
from examples.demo.health import Checker
from examples.demo.kube import Kube, condition
from examples.demo.places import CLUSTER, ROOT, LocalPlace, command, master_addresses
from tests.chaos import victims

READY_WITHIN_S = 90.0
HEALED_WITHIN_S = 150.0


class Failure(Exception):
    """The cluster did not come back, or a row was lost."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round does. Times in seconds."""

    target: str  # operator, master, node
    lose_machine: bool
    wait_s: float
    pick: int

    @staticmethod
    def draw(rng: random.Random) -> Round:
        """The next round of a seed."""
        return Round(
            target=rng.choice(("operator", "master", "node")),
            lose_machine=rng.random() < 0.4,
            wait_s=rng.uniform(0.0, 8.0),
            pick=rng.randrange(1 << 30),
        )


class Chaos:
    """One cluster under one stream of writes."""

    def __init__(self, place: LocalPlace) -> None:
        self.place = place
        self.kube = Kube(place.kubeconfig, "default")
        self.checker = Checker(self.masters)
        self.machine_off = ""

    def masters(self) -> str:
        """Addresses of the masters of the moment."""
        return master_addresses(self.kube)

    def start(self) -> None:
        """Operator, cluster, table."""
        self.place.start_operator()
        self.kube.apply_crds(ROOT / "crds")
        for name in ("cluster.yaml", "flights.yaml"):
            for kind, resource in self.kube.apply(ROOT / "examples" / name):
                deadline = time.monotonic() + READY_WITHIN_S
                while condition(self.kube.status(kind, resource), "Ready")["status"] != "True":
                    if time.monotonic() > deadline:
                        raise Failure(f"{kind}/{resource} is not Ready after {READY_WITHIN_S:.0f} s")
                    time.sleep(0.3)

    def wait_for_a_view(self) -> None:
        """Until the masters have told the checker who carries what."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not self.checker.replicas_by_machine():
            if time.monotonic() > deadline:
                raise Failure(f"the masters do not answer: {self.checker.faults}")
            time.sleep(0.1)

    def play(self, one: Round) -> str:
        """Strike once and wait until all is whole; what was done, in words."""
        did = []
        if one.lose_machine:
            self.wait_for_a_view()
            carried = self.checker.replicas_by_machine()
            self.machine_off = list(carried)[one.pick % len(carried)]
            self.place.power_off(self.machine_off)
            self.place.wipe(self.machine_off)
            did.append(f"machine {self.machine_off} lost for good with {carried[self.machine_off]} replicas")
        time.sleep(one.wait_s)
        did.append(f"after {one.wait_s:.1f} s kill -9 of {self._strike(one)}")
        started = time.monotonic()
        self._wait_healed()
        did.append(f"whole again after {time.monotonic() - started:.1f} s")
        if self.machine_off:
            self.place.power_on(self.machine_off)
            self.machine_off = ""
            self._wait_members()
        return ", ".join(did)

    def _strike(self, one: Round) -> str:
        if one.target == "operator":
            self.place.kill_operator()
            self.place.start_operator()
            return "the operator"
        found = [v for v in victims.find(self.place.folder) if v.role == one.target]
        if not found:
            return f"no {one.target}: none runs"
        victim = found[one.pick % len(found)]
        victims.kill(victim)
        return f"{victim.role} {victim.node_id[:8]}"

    def _wait_healed(self) -> None:
        deadline = time.monotonic() + HEALED_WITHIN_S
        fresh = self.checker.seen + 2  # the one under way may be from before the strike
        while self.checker.seen < fresh or not self.checker.healed(self.machine_off):
            if not self.place.operator_alive():
                raise Failure("the operator has ended by itself")
            if time.monotonic() > deadline:
                raise Failure(f"not whole after {HEALED_WITHIN_S:.0f} s: {self.checker.faults}")
            time.sleep(0.4)

    def _wait_members(self) -> None:
        """Until the machine that came back empty carries a new node, so that the next round may lose one again."""
        deadline = time.monotonic() + HEALED_WITHIN_S
        while (ready := self.kube.status("TabletCluster", CLUSTER).get("readyReplicas")) != 5:
            if time.monotonic() > deadline:
                raise Failure(f"{ready} of 5 nodes ready {HEALED_WITHIN_S:.0f} s after the machine came back")
            time.sleep(0.4)


def run(folder: Path, rounds: int, seconds: float, seed: int) -> None:
    """Play rounds until their number or the time is up, then compare.

    Raises:
        Failure: with what was wrong.
    """
    rng = random.Random(seed)
    with LocalPlace(folder, keep=False) as place:
        chaos = Chaos(place)
        chaos.start()
        output = folder / "stream.log"
        begun = time.monotonic()
        with (
            chaos.checker,
            open(output, "wb") as log,
            subprocess.Popen(
                command("stream", "--masters", chaos.masters()), stdout=log, stderr=log
            ) as stream,
        ):
            try:
                chaos.wait_for_a_view()
                for number in range(1, rounds + 1):
                    if time.monotonic() - begun > seconds:
                        break
                    done = chaos.play(Round.draw(rng))
                    click.echo(f"round {number}: {done}")
                stream.terminate()
                stream.wait(60)
            finally:
                stream.kill()
        if stream.returncode != 0:
            raise Failure(f"the stream of writes failed: see {output}")
        _compare(chaos, last_json(output.read_text(), output))


def _compare(chaos: Chaos, streamed: dict[str, int]) -> None:
    arguments = ("--masters", chaos.masters(), "--at-least", str(streamed["timestamp"]))
    read = subprocess.run(command("verify", *arguments), capture_output=True, text=True, check=False)
    if read.returncode != 0:
        raise Failure(f"verify failed: {read.stderr[-2000:]}")
    found = last_json(read.stdout, chaos.place.folder)
    if (found["rows"], found["checksum"]) != (streamed["rows"], streamed["checksum"]):
        raise Failure(
            f"acknowledged {streamed['rows']} rows, checksum {streamed['checksum']:016x}; "
            f"read back {found['rows']} rows, checksum {found['checksum']:016x}"
        )
    click.echo(
        f"{streamed['rows']} rows acknowledged, all read back equal; longest wait {streamed['longest_wait_ms']} ms"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=20, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="Begin no round after this long.")
@click.option("--seed", type=int, help="Repeat a run; drawn if absent.")
def main(rounds: int, seconds: float, seed: int | None) -> None:
    """Kill -9 of the operator, a master or a node, at moments that the seed draws."""
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="stele-chaos-"))
    click.echo(f"seed {seed}, table of {flights.KEY}, logs in {folder}")
    try:
        run(folder, rounds, seconds, seed)
    except Failure as exc:
        click.echo(f"FAILED with seed {seed}: {exc}\nlogs are in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    click.echo("1 passed, 0 failed")


if __name__ == "__main__":
    main()

"""`python -m tests.chaos --rounds 20 [--seed N] [--first N]`: kill -9 of the operator, a master or a node, also in mid-heal.

Each round draws what happens; some rounds first lose a whole machine for good and strike while it is healed. After each
round the cluster must be whole again unaided, whoever was killed as another process or replaced; at the end every
acknowledged row must be there, once and unchanged.

Exit status 1 if it is not; then the seed, the round and the folder with all logs are printed.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from examples.demo import flights
from examples.demo.__main__ import last_json
from examples.demo.health import Checker
from examples.demo.kube import Kube, condition
from examples.demo.places import CLUSTER, ROOT, LocalPlace, command, master_addresses
from tests.chaos import victims
from tests.chaos.victims import Victim

MASTERS, NODES = 3, 5
"""As in examples/cluster.yaml."""
_LEASE_MS = 300

READY_WITHIN_S = 300.0
HEALED_WITHIN_S = 300.0


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

    def start(self, lease_ms: int) -> None:
        """Operator, cluster, table. `lease_ms`: of leaders; 0: none."""
        self.place.start_operator()
        self.kube.apply_crds(ROOT / "crds")
        cluster = self.place.folder / "cluster.yaml"
        text = (ROOT / "examples" / "cluster.yaml").read_text()
        cluster.write_text(
            text.replace("\nspec:\n", f"\nspec:\n  leaderLease: {lease_ms}ms\n") if lease_ms else text
        )
        for path in (cluster, ROOT / "examples" / "flights.yaml"):
            for kind, resource in self.kube.apply(path):
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
        whom, is_back = self._strike(one)
        did.append(f"after {one.wait_s:.1f} s kill -9 of {whom}")
        started = time.monotonic()
        self._wait_back(whom, is_back)
        self._wait_healed()
        did.append(f"whole again after {time.monotonic() - started:.1f} s")
        if self.machine_off:
            self.place.power_on(self.machine_off)
            self.machine_off = ""
        self._wait_members()
        return ", ".join(did)

    def _strike(self, one: Round) -> tuple[str, Callable[[], bool]]:
        """Kill; whom, and whether it is back."""
        if one.target == "operator":
            return "the operator", self._strike_operator()
        found = [v for v in victims.find(self.place.folder) if v.role == one.target]
        at = one.pick % max(1, len(found))
        for victim in (*found[at:], *found[:at]):  # who ends by itself meanwhile was not struck
            before = self.checker.incarnation(victim.node_id)
            if victims.kill(victim):
                return f"{victim.role} {victim.node_id[:8]}", partial(self._is_back, victim, before)
        raise Failure(f"there is no {one.target} to strike: {len(found)} were found")

    def _strike_operator(self) -> Callable[[], bool]:
        self.place.kill_operator()
        before = self._leases_taken()
        self.place.start_operator()
        return lambda: self._leases_taken() > before

    def _leases_taken(self) -> int:
        return (self.place.folder / "operator.log").read_text(errors="replace").count("lease taken")

    def _is_back(self, victim: Victim, before: int) -> bool:
        """Whether it runs as another process, which the masters hear, or another member has its place."""
        if self.checker.retired(victim.node_id):
            return True
        others = [v for v in victims.find(self.place.folder) if v.node_id == victim.node_id]
        return any(v.pid != victim.pid for v in others) and self.checker.incarnation(victim.node_id) > before

    def _wait_back(self, whom: str, is_back: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HEALED_WITHIN_S
        while not is_back():
            self._check_operator()
            if time.monotonic() > deadline:
                raise Failure(f"{whom} is not back {HEALED_WITHIN_S:.0f} s after it was killed")
            time.sleep(0.4)

    def _wait_healed(self) -> None:
        deadline = time.monotonic() + HEALED_WITHIN_S
        fresh = self.checker.seen + 2  # the one under way may be from before the strike
        while self.checker.seen < fresh or not self.checker.healed(self.machine_off):
            self._check_operator()
            if time.monotonic() > deadline:
                raise Failure(f"not whole after {HEALED_WITHIN_S:.0f} s: {self.checker.faults}")
            time.sleep(0.4)

    def _check_operator(self) -> None:
        if not self.place.operator_alive():
            raise Failure("the operator has ended by itself")

    def _wait_members(self) -> None:
        """Until all are there again, also on a machine that came back empty, so that the next round may lose one."""
        deadline = time.monotonic() + HEALED_WITHIN_S
        while (ready := self._ready()) != (MASTERS, NODES):
            if time.monotonic() > deadline:
                raise Failure(
                    f"{ready[0]} of {MASTERS} masters and {ready[1]} of {NODES} nodes are ready "
                    f"{HEALED_WITHIN_S:.0f} s after all tablets were whole"
                )
            time.sleep(0.4)

    def _ready(self) -> tuple[int, int]:
        status = self.kube.status("TabletCluster", CLUSTER)
        return status.get("readyMasters", 0), status.get("readyReplicas", 0)


def run(folder: Path, rounds: int, seconds: float, seed: int, first: int = 1, rows_per_s: int = 400) -> int:
    """Play the seed's rounds from the `first` on until their number or the time is up, then compare; how many were played.
    Meanwhile so many rows are written each second. With an odd seed leaders have leases.

    Raises:
        Failure: with what was wrong.
    """
    rng = random.Random(seed)
    for _ in range(1, first):
        Round.draw(rng)
    played = 0
    with LocalPlace(folder, keep=False) as place:
        chaos = Chaos(place)
        chaos.start(_LEASE_MS if seed % 2 else 0)
        output = folder / "stream.log"
        begun = time.monotonic()
        with (
            chaos.checker,
            open(output, "wb") as log,
            subprocess.Popen(
                command("stream", "--masters", chaos.masters(), "--rows-per-s", str(rows_per_s)),
                stdout=log,
                stderr=log,
            ) as stream,
        ):
            try:
                chaos.wait_for_a_view()
                while played < rounds and time.monotonic() - begun <= seconds:
                    one, number = Round.draw(rng), first + played
                    try:
                        done = chaos.play(one)
                    except Failure as exc:
                        raise Failure(f"round {number}, {one}: {exc}") from exc
                    played += 1
                    click.echo(f"round {number}: {done}")
                stream.terminate()
                stream.wait(60)
            finally:
                stream.kill()
        if stream.returncode != 0:
            raise Failure(f"the stream of writes failed: see {output}")
        _compare(chaos, last_json(output.read_text(), output))
    return played


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
@click.option("--first", default=1, show_default=True, help="Begin with this round of the seed.")
def main(rounds: int, seconds: float, seed: int | None, first: int) -> None:
    """Kill -9 of the operator, a master or a node, at moments that the seed draws."""
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="stele-chaos-"))
    click.echo(f"seed {seed}, table of {flights.KEY}, logs in {folder}")
    try:
        run(folder, rounds, seconds, seed, first)
    except Failure as exc:
        click.echo(f"FAILED with seed {seed}: {exc}\nlogs are in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    click.echo("1 passed, 0 failed")


if __name__ == "__main__":
    main()

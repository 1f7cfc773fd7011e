"""The demo: eight steps, each on real processes, and a comparison that can fail. `make demo` runs it.

Exit status: 0 if everything that was acknowledged was read back, 1 if not or if a stated time ran out, 130 on Ctrl-C.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from examples.demo import flights, health
from examples.demo.kube import Kube, condition
from examples.demo.narrator import Narrator
from examples.demo.places import LocalPlace

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "flights"
MASTER_PORT = 7051
READY_WITHIN_S = 90.0
HEALED_WITHIN_S = 120.0
_POLL_S = 0.4
_STEPS = 8


class Difference(Exception):
    """Something is not as it was acknowledged, or a stated time ran out."""


class Demo:
    """Runs the steps in order; keeps what one step has to tell the next."""

    def __init__(self, place: LocalPlace, console: Console) -> None:
        self.place = place
        self.console = console
        self.kube = Kube(place.kubeconfig, "default")
        self.narrator = Narrator(self.kube, CLUSTER, console)
        self.step_number = 1

    def step(self, text: str) -> None:
        """Announce the next step."""
        self.step_number += 1
        self.console.rule(f"[bold]{self.step_number}/{_STEPS}[/bold]  {text}", align="left")

    def run(self) -> None:
        """All steps.

        Raises:
            Difference: with a sentence that says what differs from what.
        """
        self.step("a Kubernetes of five machines on this one, and the operator")
        pid = self.place.start_operator()
        self.narrator.say(f"operator runs as process {pid}; logs in {self.place.logs()}")

        self.step("kubectl apply: a TabletCluster of 3 masters and 5 nodes, a TabletGroup of 8 tablets x 3")
        self.kube.apply_crds(ROOT / "crds")
        self._apply_and_wait("cluster.yaml")
        self._apply_and_wait("flights.yaml")

        self.step(f"load {flights.ROWS:,} flights")
        loaded = self._tool("load")
        self.narrator.say(
            f"{loaded['rows']:,} rows acknowledged at {loaded['rows_per_s']:,} rows/s, "
            f"checksum {loaded['checksum']:016x}"
        )
        if loaded["rows"] != flights.ROWS:
            raise Difference(f"{loaded['rows']} of {flights.ROWS} flights were acknowledged")

        self.step("keep writing, and switch one machine off for good, volumes and all")
        streamed = self._lose_a_machine()
        self.narrator.say(
            f"second stream: {streamed['rows']:,} rows acknowledged one by one, median {streamed['median_ms']} ms; "
            f"the longest time a write had to wait: {streamed['longest_wait_ms']} ms",
            "bold",
        )

        self.step("read everything back at one snapshot, compare with what was acknowledged")
        verified = self._verify(loaded, streamed)

        self.step("the same snapshot from Spark; delay by carrier through the sink and back")
        self._spark(verified)

    def _apply_and_wait(self, name: str) -> None:
        for kind, resource in self.kube.apply(ROOT / "examples" / name):
            self.narrator.say(f"applied {kind}/{resource} from examples/{name}")

            def ready(kind: str = kind, resource: str = resource) -> bool:
                return bool(condition(self.kube.status(kind, resource), "Ready")["status"] == "True")

            self._wait(ready, READY_WITHIN_S, f"{kind}/{resource} is not Ready")
            self.narrator.say(f"{kind}/{resource} is Ready", "green")

    def _wait(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Narrate until `done`."""
        deadline = time.monotonic() + seconds
        while True:
            over = done()
            self.narrator.catch_up()
            if over:
                return
            if not self.place.operator_alive():
                raise Difference("the operator has ended")
            if time.monotonic() > deadline:
                raise Difference(f"{otherwise} after {seconds:.0f} s")
            time.sleep(_POLL_S)

    def masters(self) -> str:
        """Addresses of the masters of the moment, as --masters takes them."""
        return master_addresses(self.kube)

    def _lose_a_machine(self) -> dict[str, Any]:
        output = self.place.folder / "stream.log"
        with (
            open(output, "wb") as log,
            subprocess.Popen(
                command("stream", "--masters", self.masters()), stdout=log, stderr=log
            ) as stream,
        ):
            try:
                time.sleep(2)
                machine = self._victim()
                self.step("what the operator sees and does until every tablet has three healthy voters again")
                self.narrator.say(f"machine {machine} is off for good: its disks are gone", "bold red")
                self.place.power_off(machine, for_good=True)
                with health.Checker(self.masters) as checker:
                    self._wait(lambda: checker.healed(machine), HEALED_WITHIN_S, "not healed")
                    self.narrator.say(f"healed: {checker.summary()}", "bold green")
                stream.terminate()
                stream.wait(60)
            finally:
                stream.kill()
        if stream.returncode != 0:
            raise Difference(f"the second stream failed: see {output}")
        return last_json(output.read_text(), output)

    def _victim(self) -> str:
        """A machine that carries a master and a node, so that both have to be replaced."""
        by_role = {
            role: {
                p.spec.node_name for p in self.kube.pods(f"stele.dev/cluster={CLUSTER},stele.dev/role={role}")
            }
            for role in ("master", "node")
        }
        both = sorted(by_role["master"] & by_role["node"])
        self.narrator.say(f"masters on {sorted(by_role['master'])}, nodes on {sorted(by_role['node'])}")
        return str(both[0])

    def _verify(self, loaded: dict[str, Any], streamed: dict[str, Any]) -> dict[str, Any]:
        newest = max(loaded["timestamp"], streamed["timestamp"])
        read = self._tool("verify", "--at-least", str(newest))
        rows = loaded["rows"] + streamed["rows"]
        checksum = flights.add(loaded["checksum"], streamed["checksum"])
        self.narrator.say(f"acknowledged  {rows:,} rows, checksum {checksum:016x}")
        self.narrator.say(
            f"read back     {read['rows']:,} rows, checksum {read['checksum']:016x}, {read['rows_per_s']:,} rows/s"
        )
        if (read["rows"], read["checksum"]) != (rows, checksum):
            raise Difference("what was read back is not what was acknowledged")
        self.narrator.say("equal: nothing acknowledged was lost or changed", "bold green")
        return read

    def _spark(self, verified: dict[str, Any]) -> None:
        self._apply_and_wait("delays.yaml")
        result = self._tool("spark", "--snapshot", str(verified["snapshot"]))
        if result["rows"] != verified["rows"]:
            raise Difference(
                f"Spark read {result['rows']} rows, the client {verified['rows']} at the same snapshot"
            )
        table = Table("carrier", "flights", "mean arrival delay, minutes")
        for row in result["delays"]:
            table.add_row(row["carrier"], f"{row['flights']:,}", f"{row['mean_arr_delay']:.3f}")
        self.console.print(table)
        if not result["same"]:
            raise Difference("what Spark read back from table delays is not what it wrote")
        self.narrator.say(
            f"Spark read the same {result['rows']:,} rows, wrote {len(result['delays'])} into delays "
            "and read them back equal",
            "bold green",
        )

    def _tool(self, name: str, *arguments: str) -> dict[str, Any]:
        log = self.place.folder / f"{name}.log"
        with open(log, "wb") as errors:
            interactive = name == "load" and self.console.is_terminal
            done = subprocess.run(
                command(name, "--masters", self.masters(), *arguments),
                stdout=subprocess.PIPE,
                stderr=None if interactive else errors,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            tail = log.read_text().strip().splitlines()[-1:] or ["no message"]
            raise Difference(f"{name} failed with {done.returncode}: {tail[0]}; see {log}")
        return last_json(done.stdout, log)


def master_addresses(kube: Kube) -> str:
    """host:port of the cluster's masters, separated by commas."""
    pods = kube.pods(f"stele.dev/cluster={CLUSTER},stele.dev/role=master")
    return ",".join(f"{p.status.pod_ip}:{MASTER_PORT}" for p in pods if p.status.pod_ip)


def command(name: str, *arguments: str) -> list[str]:
    """The command line of one of the demo's programs."""
    return [sys.executable, "-m", "examples.demo.tools", name, *arguments]


def last_json(output: str, where: Path) -> dict[str, Any]:
    """The result that a program printed last.

    Raises:
        Difference: if there is none.
    """
    lines = output.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Difference(f"the last line is no result: see {where}") from None
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="Leave everything running and print lines to try.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to keep logs and volumes.")
def main(keep: bool, folder: Path | None) -> None:
    """Apply, write, lose a machine, heal, read it from Spark."""
    console = Console(soft_wrap=True)
    folder = folder or Path(tempfile.mkdtemp(prefix="stele-demo-"))
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    console.rule(f"[bold]1/{_STEPS}[/bold]  Stele, installed in {sys.prefix}", align="left")
    try:
        with LocalPlace(folder, keep=keep) as place:
            demo = Demo(place, console)
            try:
                demo.run()
            except BaseException:
                demo.narrator.catch_up()
                raise
            if keep:
                _print_lines_to_try(console, place, demo)
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        sys.exit(130)
    except (Difference, RuntimeError, OSError) as exc:
        console.print(f"[bold red]FAILED[/bold red]: {exc}\nLogs are in {folder}", highlight=False)
        sys.exit(1)
    console.print(f"[bold green]The demo succeeded[/bold green] in {time.monotonic() - started:.0f} s.")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # SIGTERM ends the demo as Ctrl-C does: nothing is left running


def _print_lines_to_try(console: Console, place: LocalPlace, demo: Demo) -> None:
    bin_folder = Path(sys.prefix) / "bin"
    console.print(
        f"""
Everything is left running. Lines to try:

  export PATH={bin_folder}:$PATH KUBECONFIG={place.kubeconfig} STELE_MASTERS={demo.masters()}
  stele ksck
  stele table list
  stele table scan flights --columns carrier,flight,arr_delay --limit 5
  kubectl get tc,tg          # where a kubectl is at hand
  stele-local --folder {place.folder} status
  stele-local --folder {place.folder} off n4

To stop it:  kill {(place.folder / "operator.pid").read_text()}; stele-local --folder {place.folder} down
""",
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    main()

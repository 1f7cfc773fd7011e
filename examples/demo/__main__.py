"""The demo: eight steps, each on real processes, and a comparison that can fail. `make demo` runs it.

Exit status: 0 if everything that was acknowledged was read back, 1 if not or if a stated time ran out, 130 on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from examples.demo import flights
from examples.demo.kube import condition
from examples.demo.narrator import Narrator
from examples.demo.places import CLUSTER, ROOT, LocalPlace, Place

READY_WITHIN_S = 90.0
HEALED_WITHIN_S = 120.0
REPLACED_WITHIN_S = 30.0
TOOL_WITHIN_S = 1800.0
_POLL_S = 0.4
_STEPS = 8


class Difference(Exception):
    """Something is not as it was acknowledged, or a stated time ran out."""


class Demo:
    """Runs the steps in order; keeps what one step has to tell the next."""

    def __init__(self, place: Place, console: Console) -> None:
        self.place = place
        self.console = console
        self.kube = place.kube
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
        self.step(self.place.title)
        self.console.print(
            "Each line has the seconds since the start. `event` and `status` are what the operator writes into Kubernetes.",
            highlight=False,
        )
        self.place.set_up(self.kube, self.narrator.say)

        self.step("apply a TabletCluster of 3 + 5 and a TabletGroup of 8 tablets x 3")
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

        self.step("read all back at one snapshot, compare with what was acknowledged")
        verified = self._verify(loaded, streamed)

        self.step("the same snapshot from Spark; delay by carrier via the sink and back")
        self._spark(verified)
        self._tell_what_remains()

    def _apply_and_wait(self, name: str) -> None:
        for kind, resource in self.kube.apply(ROOT / "examples" / name):
            self.narrator.say(f"applied {kind}/{resource} from examples/{name}")

            def ready(kind: str = kind, resource: str = resource) -> bool:
                return bool(condition(self.kube.status(kind, resource), "Ready")["status"] == "True")

            self._wait(ready, READY_WITHIN_S, f"{kind}/{resource} is not Ready")
            self.narrator.say(f"{kind}/{resource} is Ready", "green")

    def _wait(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Narrate until `done`."""
        seconds *= self.place.patience
        deadline = time.monotonic() + seconds
        while True:
            over = done()
            self.narrator.catch_up()
            if over:
                return
            if not self.place.operator_alive():
                raise Difference(f"the operator has ended; operator.log in {self.place.logs()} says why")
            if time.monotonic() > deadline:
                raise Difference(f"{otherwise} after {seconds:.0f} s")
            time.sleep(_POLL_S)

    def _lose_a_machine(self) -> dict[str, Any]:
        machine = self._victim()
        stream = self.place.begin("stream")
        try:
            self.narrator.say(
                f"a second stream writes made-up flights of a carrier {flights.STREAM_CARRIER}, one by one"
            )
            self._pause(2)
            self.narrator.say(f"switching machine {machine} off")
            self.place.power_off(machine, self._look)
            self.narrator.say(f"machine {machine} is off", "bold red")
            self.place.wipe(machine, self._look)
            self.narrator.say("and its disks are gone for good", "bold red")
            self.step("what the operator does until every tablet has three voters again")
            self.console.print(
                "docs/healing.md has the names of the steps. Blocked: it waits, and the line says for what.",
                highlight=False,
            )
            with self.place.checker(machine) as checker:
                self._wait(lambda: checker.healed(machine), HEALED_WITHIN_S, "not healed")
                self.narrator.say(f"healed: {checker.summary()}", "bold green")
            if condition(self.kube.status("TabletCluster", CLUSTER), "Degraded")["status"] == "True":
                self.narrator.say(
                    "Degraded stays for now: the tablets are whole, the lost master and node are still being replaced"
                )
            return last_json(stream.stop(60), "the second stream")
        finally:
            stream.kill()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        self.narrator.catch_up()

    def _victim(self) -> str:
        """A machine that carries a master and a node, so that both have to be replaced."""
        by_role = {
            role: {
                p.spec.node_name for p in self.kube.pods(f"stele.dev/cluster={CLUSTER},stele.dev/role={role}")
            }
            for role in ("master", "node")
        }
        both = sorted(by_role["master"] & by_role["node"])
        masters, nodes = (", ".join(sorted(by_role[role])) for role in ("master", "node"))
        self.narrator.say(f"masters run on {masters}; nodes on {nodes}")
        return self.place.victim([str(machine) for machine in both])

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
        self.console.print(
            f"{flights.STREAM_CARRIER}: the made-up flights of the second stream", highlight=False
        )
        if not result["same"]:
            raise Difference("what Spark read back from table delays is not what it wrote")
        self.narrator.say(
            f"Spark read the same {result['rows']:,} rows, wrote {len(result['delays'])} into delays "
            "and read them back equal",
            "bold green",
        )

    def _tell_what_remains(self) -> None:
        """One line on what is not as it was in the beginning: a machine, and what would have run on it."""
        degraded = condition(self._until_replaced(), "Degraded")
        if degraded["status"] != "True":
            return
        if degraded["reason"] == "NodePending" and "no machine takes it" in degraded["message"]:
            node = degraded["message"].partition(":")[0]
            why = (
                f"{node}, which takes the lost node's place, waits for a machine that runs no other node, "
                "and the lost one was the last. No tablet counts on it"
            )
        else:
            why = degraded["message"]
        self.narrator.say(f"what remains: Degraded={degraded['reason']}: {why}")

    def _until_replaced(self) -> dict[str, Any]:
        """Narrate for a moment, until no lost master or node is left to be replaced; the status then."""
        until = time.monotonic() + REPLACED_WITHIN_S * self.place.patience
        while True:
            status = self.narrator.catch_up()
            lost = condition(status, "Degraded")["reason"] in ("MasterLost", "NodeLost")
            if not lost or time.monotonic() > until:
                return status
            time.sleep(_POLL_S)

    def _tool(self, name: str, *arguments: str) -> dict[str, Any]:
        # While a program draws a bar on the terminal, what is seen is printed after it.
        look = self.narrator.look if self.place.shows_bar(name) else self.narrator.catch_up

        def meanwhile() -> None:
            look()

        output = self.place.run(
            name, *arguments, seconds=TOOL_WITHIN_S, say=self.narrator.say, meanwhile=meanwhile
        )
        self.narrator.catch_up()
        return last_json(output, name)


def last_json(output: str, what: object) -> dict[str, Any]:
    """The result that a program printed last.

    Raises:
        Difference: if there is none.
    """
    for line in reversed(output.strip().splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise Difference(f"no result was printed by {what}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="Leave everything running and print lines to try.")
@click.option("--kube", is_flag=True, help="In the Kubernetes that KUBECONFIG names, not in one of its own.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to keep logs and volumes.")
def main(keep: bool, kube: bool, folder: Path | None) -> None:
    """Apply, write, lose a machine, heal, read it from Spark."""
    console = Console(soft_wrap=True)
    lasting = keep or folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="stele-demo-"))
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    console.rule(f"[bold]1/{_STEPS}[/bold]  Stele, installed in {sys.prefix}", align="left")
    try:
        with place_of(kube, folder, keep) as place:
            demo = Demo(place, console)
            try:
                demo.run()
            except BaseException:
                demo.narrator.catch_up()
                raise
            if keep:
                _print_lines_to_try(console, place)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; all that the demo started is stopped. {what_lies_in(folder)}", highlight=False
        )
        sys.exit(130)
    except (Difference, RuntimeError, OSError) as exc:
        console.print("[bold red]FAILED[/bold red]: ", end="")
        console.print(
            f"{exc}\nAll that the demo started is stopped. {what_lies_in(folder)}",
            highlight=False,
            markup=False,
        )
        sys.exit(1)
    if not lasting:
        shutil.rmtree(folder, ignore_errors=True)
    elif not keep:
        console.print(what_lies_in(folder), highlight=False)
    console.print(f"[bold green]The demo succeeded[/bold green] in {time.monotonic() - started:.0f} s.")


def what_lies_in(folder: Path) -> str:
    """What a demo has left on the disk, where, and how to be rid of it."""
    size = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) if folder.exists() else 0
    if not size:
        return "It left nothing."
    return f"Logs and volumes ({size / 1e6:,.0f} MB) lie in {folder}; `rm -r {folder}` removes them."


@contextlib.contextmanager
def place_of(kube: bool, folder: Path, keep: bool) -> Iterator[Place]:
    """The place that was asked for."""
    if not kube:
        with LocalPlace(folder, keep=keep) as local:
            yield local
        return
    from examples.demo.kube_place import KubePlace  # it needs settings that the other does not

    with KubePlace(folder, keep=keep) as real:
        yield real


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # SIGTERM and a closed terminal end the demo as Ctrl-C does: nothing is left running


def _print_lines_to_try(console: Console, place: Place) -> None:
    console.print(
        f"\nEverything is left running. Lines to try:\n{place.lines_to_try()}", highlight=False, markup=False
    )


if __name__ == "__main__":
    main()

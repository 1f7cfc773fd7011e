"""What a Kubernetes cluster cannot do for us: switch a machine off, and bring images onto its machines.

Both are commands that the user names, so that the demo and the end-to-end tests run on any cluster:
STELE_POWER is called as `$STELE_POWER off|on|wipe|cut|mend MACHINE`, STELE_IMAGE_LOAD as `$STELE_IMAGE_LOAD IMAGE...`.
docs/kubernetes.md has both for kind. Used by kube_place.py and tests/e2e.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("node", "operator", "tools")
TAG = os.environ.get("STELE_TAG", "dev")
_LOOK_EVERY_S = 0.4


class Missing(RuntimeError):
    """A setting or a program that is needed is not there; the message says what to do."""


def nothing() -> None:
    """What to do while one waits, for those who only wait."""


def image(name: str) -> str:
    """The reference of one of our images."""
    return f"stele/{name}:{TAG}"


def run(words: Sequence[str], seconds: float = 600, meanwhile: Callable[[], None] = nothing) -> str:
    """Run a command; returns what it printed.

    Raises:
        RuntimeError: with its last words, if it failed.
    """
    try:
        done = watched(words, seconds, meanwhile, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as exc:
        raise Missing(f"{words[0]} is not there; needed for: {shlex.join(words)}") from exc
    if done.returncode != 0:
        told = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}: {' '.join(told)}")
    return done.stdout


def watched(
    words: Sequence[str], seconds: float, meanwhile: Callable[[], None], **how: Any
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, with `meanwhile` called every 0.4 s until it ends.

    Raises:
        subprocess.TimeoutExpired: after `seconds`; then, and if `meanwhile` raises, it is killed.
    """
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(words, text=True, stdin=subprocess.DEVNULL, **how)
    try:
        while True:
            try:
                out, errors = process.communicate(timeout=_LOOK_EVERY_S)
                return subprocess.CompletedProcess(words, process.returncode, out, errors)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise
                meanwhile()
    except BaseException:
        process.kill()
        process.wait()
        raise


def helm(*words: str, seconds: float = 600) -> str:
    """Run helm, from HELM or the path."""
    return run([os.environ.get("HELM") or shutil.which("helm") or "helm", *words], seconds)


class Power:
    """Switches machines off and on. `STELE_POWER` must be set."""

    def __init__(self) -> None:
        self._command = shlex.split(os.environ.get("STELE_POWER", ""))
        if not self._command:
            raise Missing(
                "STELE_POWER is not set: a command that is called with off, on or wipe and the name of a machine; "
                "docs/kubernetes.md has one for kind"
            )
        self._changed: dict[str, str] = {}

    def __call__(self, verb: str, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """`off`, `on`, `wipe` (while it is off: its disks are lost), `cut` (its network), `mend`."""
        self._changed[machine] = verb
        run([*self._command, verb, machine], 180, meanwhile)
        if verb in ("on", "mend"):
            del self._changed[machine]

    def restore(self) -> None:
        """Back to where we found them: every machine on, and on the network."""
        for machine, verb in list(self._changed.items()):
            self("mend" if verb == "cut" else "on", machine)


def load_images(cluster_uid: str, tell: Callable[[str], None]) -> None:
    """Bring our images onto the machines, those that they do not have yet by our own notes.

    Without STELE_IMAGE_LOAD the machines must have them, or be able to pull them.
    """
    command = shlex.split(os.environ.get("STELE_IMAGE_LOAD", ""))
    if not command:
        tell("STELE_IMAGE_LOAD is not set: the machines must have the images already")
        return
    notes = ROOT / ".demo" / "images" / f"{cluster_uid}.json"
    loaded: dict[str, str] = json.loads(notes.read_text()) if notes.exists() else {}
    ids = {name: _image_id(image(name)) for name in IMAGES}
    wanted = [image(n) for n in IMAGES if not ids[n] or loaded.get(image(n)) != ids[n]]
    if not wanted:
        tell("the machines have the images")
        return
    tell(f"loading {', '.join(wanted)} onto the machines")
    run([*command, *wanted], 1800)
    notes.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text(json.dumps({**loaded, **{image(n): ids[n] for n in IMAGES}}))


def _image_id(reference: str) -> str:
    docker = shlex.split(os.environ.get("STELE_DOCKER", "docker"))
    try:
        return run([*docker, "image", "inspect", "--format", "{{.Id}}", reference], 60).strip()
    except RuntimeError:
        return ""  # built elsewhere: load always

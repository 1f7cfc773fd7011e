"""Records what a real API server answers: `python -m tests.kube_contract.record --kubeconfig K`. Needs no node."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import ssl
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.kube_contract.play import Player

RECORDINGS = Path(__file__).parent / "recordings"


def server(kubeconfig: Path) -> Player:
    """A player for the current context of a kubeconfig with a client certificate or a token."""
    config: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
    cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
    user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
    tls = ssl.create_default_context()
    if authority := cluster.get("certificate-authority-data"):
        tls.load_verify_locations(cadata=base64.b64decode(authority).decode())
    elif authority := cluster.get("certificate-authority"):
        tls.load_verify_locations(cafile=authority)
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as both:
            both.write(
                base64.b64decode(user["client-certificate-data"])
                + b"\n"
                + base64.b64decode(user["client-key-data"])
            )
            both.flush()
            tls.load_cert_chain(both.name)
    elif "client-certificate" in user:
        tls.load_cert_chain(user["client-certificate"], user["client-key"])
    return Player(cluster["server"].rstrip("/"), headers, tls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    answers = asyncio.run(server(parser.parse_args().kubeconfig).play_all())
    RECORDINGS.mkdir(exist_ok=True)
    for name, steps in answers.items():
        path = RECORDINGS / f"{name.replace(' ', '_')}.json"
        path.write_text(json.dumps(steps, indent=1, sort_keys=True) + "\n")
        print(f"{path.name}: {len(steps)} answers")


if __name__ == "__main__":
    main()

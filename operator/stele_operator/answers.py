"""Answers the annotation `stele.dev/plan` of a TabletCluster in its `status.plan`. Called by reconcile.

Owns the task that works on an answer. No pass waits for this task. Invariant: an answer names the annotation
and the generation that it is for. So each question is answered once, also across restarts of the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import structlog

from stele_operator import strict
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.masters import MasterLink
from stele_operator.plan.foretold import Foretold
from stele_operator.plan.observation import Catalog, Observation
from stele_operator.plan.rehearsal import never
from stele_operator.preview import Wanted, answer

log = structlog.get_logger("stele.operator.answers")
Json = dict[str, Any]
TEXT_MAX = 8_000
_LINE_MAX = 2_000
_QUESTION_MAX = 64 << 10


class Answers:
    """The answer for one TabletCluster. `wake` is called once the answer is there."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self._asked: tuple[str, int] | None = None
        self._found: Json | None = None

    def to(self, o: Observation, link: MasterLink | None, there: Json | None, now: str) -> Json | None:
        """What status.plan should be now; None if nobody asks. `there`: the present status.plan, which stays
        until a new question is answered. Work on a question begins once the masters answer and have heard
        from all nodes.
        """
        question = o.cluster.question
        if not question.strip():
            self._asked = self._found = None
            return None
        request = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
        asked = (request, o.cluster.generation)
        if there is not None and (there.get("request"), there.get("observedGeneration")) == asked:
            return there
        if self._asked == asked and self._found is not None:
            return self._found
        begun = self._asked == asked and self._task is not None and not self._task.done()
        # To a new leading master most nodes seem silent. An answer stands for good, so it waits.
        if not begun and o.catalog is not None and o.catalog.view.settled and link is not None:
            if self._task is not None:
                self._task.cancel()
            self._asked, self._found = asked, None
            self._task = asyncio.create_task(self._work(o, o.catalog, link, question, asked, now))
        return there

    async def close(self) -> None:
        """Stop the work on the answer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _work(
        self,
        o: Observation,
        catalog: Catalog,
        link: MasterLink,
        question: str,
        asked: tuple[str, int],
        now: str,
    ) -> None:
        ended = threading.Event()  # a thread cannot be cancelled
        try:
            catalog = await link.with_sizes(catalog)
            told = await asyncio.to_thread(respond, o, question, catalog, ended.is_set)
            text, fine = bounded(told), told.fine
        except Exception:  # a question must not stop the passes
            log.exception("a question could not be answered", cluster=o.cluster.name)
            text, fine = "the question could not be answered; the operator's log says why", False
        finally:
            ended.set()
        if self._asked == asked:
            self._found = {
                "text": text,
                "fine": fine,
                "request": asked[0],
                "observedGeneration": asked[1],
                "time": now,
            }
            self._wake()


def respond(o: Observation, question: str, catalog: Catalog, stop: Callable[[], bool] = never) -> Foretold:
    """What the changes in an annotation would do. The changes are a merge patch of the present spec, as YAML
    or JSON. `stop`: as in `foretell`.
    """
    cluster = f"TabletCluster {o.cluster.namespace}/{o.cluster.name}"
    if o.cluster.spec is None:
        return Foretold(
            cluster,
            refused=("the present spec breaks a rule, so it cannot be changed by a patch: correct it first",),
        )
    if len(question) > _QUESTION_MAX:
        return Foretold(
            cluster,
            refused=(
                f"the annotation is longer than {_QUESTION_MAX >> 10} KiB: give only fields that change",
            ),
        )
    try:
        found = strict.documents(question, of_strangers=True)
    except strict.BadText as exc:
        return Foretold(cluster, refused=(f"the annotation is neither JSON nor YAML: {exc}",))
    patch = found[0] if len(found) == 1 else None
    if not isinstance(patch, dict):
        return Foretold(
            cluster,
            refused=(
                'the annotation is not a part of a spec; expected an object such as {"nodes": {"replicas": 4}}',
            ),
        )
    present = o.cluster.spec.model_dump(mode="json", exclude_none=True)
    spec, faults = strict.spec_of(TabletClusterSpec, merged(present, patch))
    if spec is None:
        return Foretold(cluster, refused=faults)
    return answer(o, Wanted(o.cluster.namespace, o.cluster.name, spec, {}, {}), catalog, stop)


def merged(there: Any, patch: Any) -> Any:
    """The value `there` after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def bounded(told: Foretold) -> str:
    """The text of an answer, cut to TEXT_MAX characters at the end of a line."""
    lines = [line if len(line) <= _LINE_MAX else f"{line[:_LINE_MAX]}…" for line in told.lines()]
    kept: list[str] = []
    room = TEXT_MAX - 100
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            kept.append(f"{len(lines) - len(kept)} more lines: `stele-operator plan -f` shows all")
            break
        kept.append(line)
    return "\n".join(kept)

"""Estimates the end of ComfyUI's queue: each prompt takes as long as the last one of its kind."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from ..declare import Json

# Inputs that do not change how long a prompt takes.
_NO_MATTER = frozenset({"seed", "noise_seed", "prompt", "negative_prompt", "text", "image", "filename_prefix"})
# Nodes that dominate a run's time. A run is not measured if ComfyUI's cache had a result of one.
_LONG = re.compile(r"TPU(Sampler|Pipeline)$|^KSampler|^SamplerCustom")
# Limits for prompts from anyone: entries of the history and the queue, nodes, and kinds that are remembered.
MAX_FINISHED, MAX_WAITING, MAX_NODES, MAX_KINDS = 50, 200, 2000, 256


class QueueEstimator:
    """An estimator of the end of one queue. `describe` is for one thread at a time."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._seconds: dict[str, float] = {}
        self._kinds: dict[str, str | None] = {}

    def describe(self) -> dict[str, float] | None:
        """Return the queue's estimate; None if the queue is empty.

        `prompts`: how many run and wait. `seconds`: until the end of those whose kind has run. `unknown`: how many are
            of an unknown kind.
        """
        running, waiting = self._queue.get_current_queue_volatile()
        if not running and not waiting:
            return None
        ended = self._learn()
        known, unknown = 0.0, max(0, len(waiting) - MAX_WAITING)
        for item in (*running, *waiting[:MAX_WAITING]):
            if (seconds := self._seconds.get(self._kind(item) or "")) is None:
                unknown += 1
                continue
            if item in running:
                created = item[3].get("create_time") if isinstance(item[3], dict) else None
                seconds = max(0.0, seconds - (time.time() - max(ended, _number(created) / 1000)))
            known += seconds
        return {"prompts": len(running) + len(waiting), "seconds": known, "unknown": unknown}

    def _learn(self) -> float:
        """Record the durations of finished prompts; return the end of the last one as Unix time."""
        ended = 0.0
        finished = self._queue.get_history(max_items=MAX_FINISHED, map_function=lambda entry: entry)
        for entry in finished.values():
            moments = {name: data for name, data in (entry.get("status") or {}).get("messages") or ()}
            begin, end = (
                _number(moments.get(f"execution_{name}", {}).get("timestamp")) / 1000 for name in ("start", "success")
            )
            ended = max(ended, end)
            cached = moments.get("execution_cached", {}).get("nodes", ())
            prompt = entry["prompt"][2]
            is_whole = not any(_LONG.search(str(prompt.get(name, {}).get("class_type"))) for name in cached)
            if begin and end and is_whole and (kind := self._kind(entry["prompt"])) is not None:
                self._seconds.pop(kind, None)
                self._seconds[kind] = end - begin
                if len(self._seconds) > MAX_KINDS:
                    del self._seconds[next(iter(self._seconds))]
        # Forget prompts that have left the queue and the history.
        ids = {*finished, *(item[1] for items in self._queue.get_current_queue_volatile() for item in items)}
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in ids}
        return ended

    def _kind(self, item: Json) -> str | None:
        """Return a digest that prompts of equal duration share; None if the prompt is too large."""
        prompt_id, prompt = item[1], item[2]
        if prompt_id not in self._kinds:
            self._kinds[prompt_id] = None if len(prompt) > MAX_NODES else _digest(prompt)
        return self._kinds[prompt_id]


def _digest(prompt: Mapping[str, Json]) -> str | None:
    # ComfyUI does not check nodes that no output needs.
    inputs = {name: node.get("inputs") for name, node in prompt.items() if isinstance(node, dict)}
    nodes_by_id = {
        name: [prompt[name].get("class_type"), {key: value for key, value in values.items() if key not in _NO_MATTER}]
        for name, values in inputs.items()
        if isinstance(values, dict)
    }
    try:
        return hashlib.sha256(json.dumps(nodes_by_id, sort_keys=True, default=repr).encode()).hexdigest()
    except RecursionError:
        return None


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

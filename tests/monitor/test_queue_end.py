"""When the queue will be through, from what prompts of a kind took before."""

import copy
import time
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs.queue_eta import QueueEstimator


def prompt(seed: int = 0, steps: int = 50, text: str = "a cat") -> dict[str, Any]:
    return {
        "1": {"class_type": "Wan21TextEncoder", "inputs": {"prompt": text}},
        "2": {
            "class_type": "Wan21TPUSampler",
            "inputs": {"seed": seed, "num_inference_steps": steps, "model": ["1", 0]},
        },
    }


class Queue:
    """As ComfyUI's, with what has ended, runs and waits."""

    def __init__(self) -> None:
        self.history: dict[str, Any] = {}
        self.running: list[tuple] = []
        self.waiting: list[tuple] = []

    def get_current_queue_volatile(self) -> tuple[list, list]:
        return self.running, copy.copy(self.waiting)

    def get_history(self, *, max_items: int, map_function: Any) -> dict[str, Any]:
        return dict(list(self.history.items())[-max_items:])

    def ended(self, name: str, graph: Any, seconds: float, *, cached: tuple[str, ...] = (), ago: float = 0.0) -> None:
        end = 1000 * (time.time() - ago)
        messages = [
            ("execution_start", {"timestamp": end - 1000 * seconds}), ("execution_cached", {"nodes": list(cached)}),
            ("execution_success", {"timestamp": end}),
        ]  # fmt: skip
        self.history[name] = {"prompt": (0, name, graph, {}), "status": {"messages": messages}}


def item(name: str, graph: Any, created: Any = None) -> tuple:
    return (0, name, graph, {"create_time": created}, [])


@pytest.fixture
def describe_queue() -> Any:
    return lambda queue: QueueEstimator(queue).describe()


def test_queue_end_uses_last_duration_of_same_prompt_kind(describe_queue: Any):
    queue = Queue()
    assert describe_queue(queue) is None
    queue.ended("a", prompt(), 100.0)
    queue.ended("b", prompt(seed=3, text="a dog"), 80.0)  # the same work; the first compiled
    queue.ended("c", prompt(steps=4), 8.0)
    queue.waiting = [item("d", prompt(seed=5)), item("e", prompt(steps=4, seed=6)), item("f", prompt(steps=7))]
    assert describe_queue(queue) == {"prompts": 3, "seconds": pytest.approx(88.0), "unknown": 1}
    # One that ComfyUI had in its cache says nothing; where only the prompt was, it does.
    queue.ended("g", prompt(), 0.1, cached=("1", "2"))
    assert describe_queue(queue)["seconds"] == pytest.approx(88.0)
    queue.ended("h", prompt(), 70.0, cached=("1",))
    assert describe_queue(queue)["seconds"] == pytest.approx(78.0)


def test_queue_end_counts_running_prompt_from_end_of_previous(describe_queue: Any):
    queue = Queue()
    queue.ended("a", prompt(), 100.0, ago=30.0)
    for created, left in ((time.time() - 500, 70.0), (time.time() - 10, 90.0), (None, 70.0), ("soon", 70.0)):
        queue.running = [item("b", prompt(seed=1), 1000 * created if isinstance(created, float) else created)]
        assert describe_queue(queue)["seconds"] == pytest.approx(left, rel=0.05)
    queue.ended("a", prompt(), 100.0, ago=3000.0)
    queue.running = [item("b", prompt(), 1000 * (time.time() - 2000))]
    assert describe_queue(queue)["seconds"] == 0


def test_queue_end_inspects_limited_number_of_prompts(describe_queue: Any):
    queue = Queue()
    queue.ended("a", prompt(), 1.0)
    huge = {str(number): {"class_type": "X", "inputs": {}} for number in range(3000)}
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    huge_too = {"1": {"class_type": "X", "inputs": {"x": deep}}}
    queue.waiting = [
        item("huge", huge),
        item("deep", huge_too),
        *(item(str(number), prompt(seed=number)) for number in range(1000)),
    ]
    assert describe_queue(queue) == {"prompts": 1002, "seconds": pytest.approx(198.0), "unknown": 804}


@pytest.mark.parametrize("odd", [{"class_type": "X"}, {"class_type": "X", "inputs": [1]}, "class_type"])
def test_queue_end_ignores_invalid_node(describe_queue: Any, odd: Any):
    queue = Queue()
    queue.ended("a", prompt(), 50.0)
    queue.waiting = [item("odd", {**prompt(), "9": odd}), item("b", prompt(seed=2))]
    assert describe_queue(queue)["prompts"] == 2

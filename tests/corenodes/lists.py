"""Run in a process of its own: lists into pipeline nodes, in ComfyUI's executor, beside an ordinary node of the same.

Arguments: ComfyUI's folder and nothing. The stages say what they were given; the ordinary node says the same of all
stages in one call, and ComfyUI maps it over lists. Prints by pipeline and case what came of both, as JSON, last.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

SEEN: dict[str, list[list[Any]]] = {}
# Other values than the default.
OTHERS: Mapping[str, Any] = {
    "prompt": "a dog", "negative_prompt": "blurry", "seed": 7, "num_inference_steps": 9, "fps": 24, "sigmas": "1, 0.5",
    "model_id": "owner/name",
}  # fmt: skip


def main(comfyui: str, _: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfyui_tpu.nodes import DECLARATIONS
    from comfyui_tpu.nodes.declare import Expansion

    pipelines = [one for one in DECLARATIONS.values() if isinstance(one, Expansion)]
    print(json.dumps({one.id: Pipeline(one).cases() for one in pipelines}))


class Pipeline:
    """A pipeline node over stages that say what they are given, and an ordinary node that says the same."""

    def __init__(self, declaration: Any) -> None:
        from comfyui_tpu.nodes.comfyui import adapter

        import nodes

        self.declaration = declaration
        self.nodes = nodes.NODE_CLASS_MAPPINGS
        self.nodes[declaration.id] = adapter.node_class(declaration)
        self.nodes["TPUCollect"] = adapter.TPUCollect
        self.nodes |= {"Several": Several, "Sink": Sink, "Ordinary": self.ordinary()}
        self.stages = {stage.name: stage for stage in declaration.stages}
        for stage in declaration.stages:
            self.nodes[stage.node_id] = self.saying(stage)

    def saying(self, stage: Any) -> type:
        return told_class(list(stage.inputs), 3, lambda given: describe_inputs(stage.name, given))

    def ordinary(self) -> type:
        """All stages in one call."""
        from comfyui_tpu.nodes.declare import Link, Ref

        declaration = self.declaration

        def run(given: Mapping[str, Any]) -> tuple[Any, ...]:
            results: dict[str, tuple[Any, ...]] = {}
            values = declaration.values(given)
            for stage in declaration.active_stages(values):
                inputs = {
                    name: results[value.stage][value.output]
                    if isinstance(value, Link)
                    else values[value.input]
                    if isinstance(value, Ref)
                    else value
                    for name, value in stage.inputs.items()
                }
                results[stage.name] = describe_inputs(stage.name, {n: v for n, v in inputs.items() if v is not None})
            return tuple(results[link.stage][link.output] for link in declaration.results)

        return told_class([one.name for one in declaration.inputs], len(declaration.results), run)

    def cases(self) -> dict[str, Any]:
        sockets = [one.name for one in self.declaration.inputs if not one.is_widget]
        widgets = [one.name for one in self.declaration.inputs if one.is_widget]
        every = [*sockets, *widgets]
        cases = {
            "no list": {},
            "linked, one value": dict.fromkeys(every, 1),
            "prompts": {"prompt": 2},
            "sockets": dict.fromkeys(sockets, 3),
            "prompts with sockets": {"prompt": 3, **dict.fromkeys(sockets, 3)},
            "more prompts than sockets": {"prompt": 3, **dict.fromkeys(sockets, 2)},
            "fewer prompts than sockets": {"prompt": 2, **dict.fromkeys(sockets, 4)},
            **{f"{name} alone": {name: 2} for name in every},
            "all, each as long": dict.fromkeys(every, 2),
            "all, each of another length": {name: 1 + place % 3 for place, name in enumerate(every)},
        }
        return {name: self.both(lists, sockets if lists else ()) for name, lists in cases.items()}

    def both(self, lists: Mapping[str, int], sockets: Any) -> tuple[list[Any], list[Any]]:
        prompt: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        for one in self.declaration.inputs:
            first = one.default if one.is_widget else f"{one.name} 1"
            number = lists.get(one.name, 0)
            if number:
                rest = [f"{one.name} {2 + place}" for place in range(number - 1)]
                if one.is_widget:
                    rest = [OTHERS.get(one.name, first)] * (number - 1)
                prompt[f"list {one.name}"] = {"class_type": "Several", "inputs": {"texts": json.dumps([first, *rest])}}
                inputs[one.name] = [f"list {one.name}", 0]
            elif one.is_widget:
                inputs[one.name] = first
            elif not one.optional or one.name in sockets or one.name == "image":
                prompt[f"list {one.name}"] = {"class_type": "Several", "inputs": {"texts": json.dumps([first])}}
                inputs[one.name] = [f"list {one.name}", 0]
        for name, kind in (("ours", self.declaration.id), ("ordinary", "Ordinary")):
            prompt[name] = {"class_type": kind, "inputs": inputs}
            links = {f"place_{n}": [name, n] for n in range(len(self.declaration.results))}
            prompt[f"seen {name}"] = {"class_type": "Sink", "inputs": {"name": name, **links}}
        run(prompt)
        return SEEN.pop("ours"), SEEN.pop("ordinary")


def describe_inputs(stage: str, given: Mapping[str, Any]) -> tuple[str, str, str]:
    text = f"{stage}({', '.join(f'{name}={given[name]}' for name in sorted(given))})"
    return tuple(f"{text}[{place}]" for place in range(3))


class Any_(str):
    """A type that any other is."""

    def __ne__(self, other: object) -> bool:
        return False


def told_class(names: list[str], results: int, run: Callable[[Mapping[str, Any]], tuple[Any, ...]]) -> type:
    class Told:
        FUNCTION, RETURN_TYPES, CATEGORY = "run", (Any_("*"),) * results, "test"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"optional": {name: (Any_("*"),) for name in names}}

        def run(self, **given: Any) -> tuple[Any, ...]:
            return run({name: value for name, value in given.items() if value is not None})

    return Told


class Several:
    """A list."""

    FUNCTION, RETURN_TYPES, OUTPUT_IS_LIST, CATEGORY = "run", (Any_("*"),), (True,), "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"texts": ("STRING",)}}

    def run(self, texts: str) -> tuple[list[Any]]:
        return (json.loads(texts),)


class Sink:
    """What came to each of its places."""

    FUNCTION, RETURN_TYPES, OUTPUT_NODE, INPUT_IS_LIST, CATEGORY = "run", (), True, True, "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"name": ("STRING",)}, "optional": {f"place_{n}": (Any_("*"),) for n in range(3)},
        }  # fmt: skip

    def run(self, name: list[str], **places: list[Any]) -> tuple[()]:
        SEEN[name[0]] = [places[key] for key in sorted(places)]
        return ()


class Server:
    """As much of ComfyUI's server as its executor asks of it."""

    client_id = None
    last_node_id = None
    last_prompt_id = None

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        if event == "execution_error":
            raise AssertionError(data)

    def queue_updated(self) -> None:
        pass


def run(prompt: dict[str, Any]) -> None:
    """Checks a prompt as ComfyUI does when it is queued, and runs it."""
    import asyncio

    import execution

    is_valid, error, outputs, problems = asyncio.run(execution.validate_prompt("prompt", prompt, None))
    assert is_valid and not problems, (error, problems)
    executor = execution.PromptExecutor(Server(), cache_args={"ram": 0.0, "ram_inactive": 0.0})
    executor.execute(prompt, "prompt", {}, outputs)
    assert executor.success, executor.status_messages


if __name__ == "__main__":
    main(*sys.argv[1:])

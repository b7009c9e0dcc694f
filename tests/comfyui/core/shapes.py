"""Run in a process of its own: what nodes hand to networks and networks do not take, on our MODELs of several families.

Arguments: ComfyUI's folder and a JSON list of `[name, job, wrong]`: a job of `core_graphs`, and by case what is in
place of what there: `samples` of a shape, the text's `width`, or a part of the conditioning, as a shape. Prints the
errors by name and case as JSON, last. Nothing may be asked of a network.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comfyui_tpu.tests.support.messages import describe_error


def main(comfyui: str, said: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    sys.path.append(str(Path(__file__).parents[2] / "files"))
    import narrow  # noqa: F401
    import torch
    from comfyui_tpu.nodes.comfyui import core_model
    from comfyui_tpu.tests.comfyui import core_graphs

    import nodes

    def refuse(stage: str, *args: Any, **named: Any) -> Any:
        raise AssertionError(f"{stage} was asked")

    found: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for name, job, wrong in json.loads(said):
            graphs = core_graphs.Graphs(nodes, job)
            model = core_graphs.ours(job)
            core_model.run_stage, ask = refuse, core_model.run_stage
            found[name] = {case: find_error(graphs, model, what) for case, what in wrong.items()}
            core_model.run_stage = ask
    print(json.dumps(found))


def find_error(graphs: Any, model: Any, wrong: Mapping[str, Any]) -> Any:
    prompts = [[[one[0][0], dict(one[0][1])]] for one in graphs.prompts[:2]]
    more = {}
    for what, shape in wrong.items():
        if what == "samples":
            more["latent"] = {"samples": graphs.draw(*shape)}
        for prompt in prompts:
            if what == "width":
                prompt[0][0] = graphs.draw(1, prompt[0][0].shape[1], shape)
            elif what != "samples":
                prompt[0][1][what] = value(graphs, what, shape)
    try:
        graphs.sample(model, positive=prompts[0], negative=prompts[1], **more)
    except Exception as error:
        return {**describe_error(error), "type": type(error).__name__}
    return None


def value(graphs: Any, what: str, shape: Sequence[Any]) -> Any:
    if isinstance(shape, str):
        return shape
    if what == "reference_latents":
        return [graphs.draw(*one) for one in shape]
    if what == "clip_vision_output":
        states = graphs.draw(*shape)
        return SimpleNamespace(penultimate_hidden_states=states, last_hidden_state=states)
    return graphs.draw(*shape)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run in a process of its own: graphs of ComfyUI's own nodes, with core's torch MODEL and with ours of the same file.

Arguments: ComfyUI's folder and a job as JSON: a denoiser's `path`, or also the `folder` of the model that ours is of
(family, path, which of its denoisers); the node that makes its `latent`, with how many pixels of a side one is
(`stride`); the shapes of `latents` and of a `text` (width, and tokens of each of three prompts), `cfg`, what else is
in a conditioning by name (`more`, as shapes), and the `cases`. Prints the relative L2 of the latents by case as JSON.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comfyui_tpu.tests.comfyui.core import rows as core_rows

Graph = Callable[[Any], Any]


def main(comfyui: str, job: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd

    sys.path.append(str(Path(__file__).parents[1] / "files"))
    import narrow  # noqa: F401
    import torch

    import nodes

    said, errors = json.loads(job), {}
    with torch.inference_mode():
        graphs = Graphs(nodes, said)
        for name in said["cases"]:
            theirs = CASES[name](graphs, comfy.sd.load_diffusion_model(said["path"], {"dtype": torch.float32}))
            model = ours(said)
            ahead = Ahead(graphs) if "latent" in said and not errors else None
            found = CASES[name](graphs, model)
            if ahead is not None:
                ahead.check()
            assert found.shape == theirs.shape and found.isfinite().all()
            errors[name] = ((found - theirs).norm() / theirs.norm()).item()
            print(name, errors[name], file=sys.stderr)
    print(json.dumps(errors))


def ours(job: Mapping[str, Any]) -> Any:
    import comfy.model_patcher
    from comfyui_tpu.nodes.comfyui import core_model
    from comfyui_tpu.tests.comfyui import core_parts
    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
    from comfyui_tpu.tpu_runtime.models import spec_for_family
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    if "folder" not in job:
        return core_model.load_model(job["path"], "float32", SilentProgress)
    family, path, expert = job["folder"]
    model = choose_model(spec_for_family(family), path, precision="float32")
    found = core_model.defer_model(model, expert, SilentProgress)
    core_parts.check_later(found, comfy.model_patcher.ModelPatcher)
    return found


class Ahead:
    """What is compiled ahead of the graph that a prompt of core's nodes says, before it samples."""

    def __init__(self, graphs: "Graphs") -> None:
        import time

        import folder_paths
        from comfyui_tpu.nodes.comfyui import precompile
        from comfyui_tpu.nodes.graphs import core_calls
        from comfyui_tpu.tpu_runtime import api
        from comfyui_tpu.tpu_runtime.engine.lifecycle import current_engine
        from comfyui_tpu.tpu_runtime.programs import executables
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        path = Path(graphs.job["path"])
        folder_paths.add_model_folder_path("diffusion_models", str(path.parent))
        obtain, self.obtained = executables.compile_or_load, []
        executables.compile_or_load = lambda program: (self.obtained.append(program), obtain(program))[1]
        found = core_calls.predict(self.prompt(graphs.job, path.name), precompile.Files())
        calls = list(precompile.predict_calls(found.calls))
        calls = [(replace(model, precision="float32"), arguments) for model, arguments in calls]
        assert [list(arguments) for _, arguments in calls] == [["prediction"]], calls
        api.precompile_calls(calls, progress=SilentProgress())
        engine = current_engine()
        while not self.obtained or engine.program_cache.list_background():
            time.sleep(0.05)
        (self.program,) = self.obtained
        sample, _, inputs = self.program.args
        rows = {name: len(one.shape) and one.shape[0] for name, one in {**inputs, "sample": sample}.items()}
        # All rows of guidance are one call, texts of different lengths too, to which the sample is sent once; but for
        # models that have no guidance of two rows by themselves.
        (model, _), *_ = calls
        branches = 1 if graphs.job["cfg"] == 1.0 or model.spec.recipe.guidance != "cfg" else 2
        assert {rows[name] for name in rows if name.startswith("text")} == {branches}, rows
        assert rows["sample"] == 1, rows

    def prompt(self, job: Mapping[str, Any], name: str) -> dict[str, Any]:
        size = {**self.size(job, job["latents"]), "batch_size": 1}
        made = {name: ["given", 0] for name in ("start_image", "clip_vision_output") if self.is_given(job, name)}
        if made and job["latent"] == "WanFirstLastFrameToVideo":
            seen = {"clip_vision_start_image": ["given", 0], "clip_vision_end_image": ["given", 0]}
            made = {"start_image": ["given", 0], "end_image": ["given", 0], "vae": ["vae", 0], **seen}
        texts = {"positive": ["text", 0], "negative": ["text", 0]}
        nodes: dict[str, tuple[str, dict[str, Any]]] = {
            "unet": ("TPUUNETLoader", {"unet_name": name}),
            "text": ("CLIPTextEncode", {"clip": ["clip", 0], "text": ""}),
            "latent": (job["latent"], {**size, **({**texts, **made} if made else {})}),
            "clip": ("CLIPLoader", {}),
            "vae": ("VAELoader", {}),
        }
        for number, shape in enumerate(job["more"].get("reference_latents", ())):
            nodes[f"empty {number}"] = (job["latent"], {**self.size(job, shape), "batch_size": 1})
            inputs = {"conditioning": texts["positive"], "latent": [f"empty {number}", 0]}
            nodes[f"text {number}"] = ("ReferenceLatent", inputs)
            texts = dict.fromkeys(texts, [f"text {number}", 0])
        rows = {"positive": ["latent", 0], "negative": ["latent", 1]} if made else texts
        sampled = {"model": ["unet", 0], "cfg": job["cfg"], "latent_image": ["latent", 2 if made else 0], **rows}
        nodes["sampler"] = ("KSampler", sampled)
        return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}

    def size(self, job: Mapping[str, Any], shape: Any) -> dict[str, int]:
        """Pixels and frames of latents of a shape."""
        height, width = (job["stride"] * size for size in shape[-2:])
        length = {"length": 4 * (shape[2] - 1) + 1} if len(shape) == 5 else {}
        return {"width": width, "height": height, **length}

    def is_given(self, job: Mapping[str, Any], name: str) -> bool:
        return {"start_image": "concat_latent_image"}.get(name, name) in job.get("more", {})

    def check(self) -> None:
        """The first sampling compiled nothing more."""
        assert self.obtained == [self.program], [program.name for program in self.obtained]


class Graphs:
    """What the graphs share: prompts, an empty latent and another, nodes."""

    def __init__(self, nodes: Any, job: Mapping[str, Any]) -> None:
        import torch

        self.nodes, self.job, self.torch = nodes, job, torch
        generator = torch.Generator().manual_seed(7)
        self.draw = lambda *shape: torch.randn(*shape, generator=generator)
        self.draw_again = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(8))
        self.said: dict[str, Any] = {}  # by core's model, of what ours must do too
        self.samples = torch.zeros(job["latents"])
        self.given = 0.5 * self.draw(*job["latents"])
        more = {name: self.value(name, shape) for name, shape in job.get("more", {}).items()}
        tokens, width = job["text"]
        self.prompts = [[[0.4 * self.draw(1, length, width), {"pooled_output": None, **more}]] for length in tokens]
        self.lora = self.make_lora() if "a LoRA" in job["cases"] else {}

    def value(self, name: str, shape: Any) -> Any:
        """Something of a conditioning."""
        if name == "guidance":
            return shape
        if name == "reference_latents":
            return [0.3 * self.draw(*one) for one in shape]
        if name == "clip_vision_output":
            seen = self.draw(*shape)
            return SimpleNamespace(penultimate_hidden_states=seen, last_hidden_state=seen)
        if name == "concat_mask":
            mask = self.torch.ones(shape)
            mask[:, :, 0] = 0.0
            return mask
        return 0.4 * self.draw(*shape)

    def make_lora(self) -> dict[str, Any]:
        if self.samples.ndim == 5:
            return self.make_lora_of_wan() if self.samples.shape[2] > 1 else self.make_lora_of_qwen_image()
        return self.make_lora_of_z_image() if self.samples.shape[1] == 16 else self.make_lora_of_flux2()

    def make_lora_of_z_image(self) -> dict[str, Any]:
        """As trainers write it: diffusers' names with a prefix or two, or the makers', all parts of a block."""
        lora: dict[str, Any] = {}
        for name, size, out in (
            ("diffusion_model.layers.0.attention.to_q", 1152, 1152),
            ("transformer.layers.0.attention.to_out.0", 1152, 1152),
            ("diffusion_model.layers.1.attention.qkv", 1152, 3456),
            ("diffusion_model.layers.1.attention.out", 1152, 1152),
            ("diffusion_model.layers.1.feed_forward.w2", 3072, 1152),
            ("diffusion_model.layers.1.adaLN_modulation.0", 1152, 4608),
            ("diffusion_model.noise_refiner.0.attention.to_k", 1152, 1152),
            ("diffusion_model.context_refiner.0.feed_forward.w1", 1152, 3072),
        ):
            lora[f"{name}.lora_A.weight"] = 0.1 * self.draw(4, size)
            lora[f"{name}.lora_B.weight"] = 0.1 * self.draw(out, 4)
        return lora

    def make_lora_of_qwen_image(self) -> dict[str, Any]:
        """As trainers write it: diffusers' names, with a prefix, with none, or in kohya's spelling."""
        lora: dict[str, Any] = {}
        for name, size, out in (
            ("diffusion_model.transformer_blocks.0.attn.to_q", 256, 256),
            ("transformer.transformer_blocks.0.attn.to_out.0", 256, 256),
            ("transformer_blocks.1.img_mlp.net.0.proj", 256, 1024),
            ("transformer_blocks.1.txt_mod.1", 256, 1536),
            ("lora_unet_transformer_blocks_1_attn_add_k_proj", 256, 256),
        ):
            ends = ("lora_down.weight", "lora_up.weight") if "unet" in name else ("lora_A.weight", "lora_B.weight")
            lora[f"{name}.{ends[0]}"] = 0.1 * self.draw(4, size)
            lora[f"{name}.{ends[1]}"] = 0.1 * self.draw(out, 4)
        return lora

    def make_lora_of_flux2(self) -> dict[str, Any]:
        """Of queries, keys and values in one, as the makers have them, and of keys alone, as diffusers has them."""
        lora: dict[str, Any] = {}
        for name, out in (
            ("diffusion_model.double_blocks.0.img_attn.qkv", 768),
            ("diffusion_model.double_blocks.1.txt_attn.proj", 256),
            ("transformer.transformer_blocks.1.attn.to_k", 256),
        ):
            ends = ("lora_A.weight", "lora_B.weight") if "to_k" in name else ("lora_down.weight", "lora_up.weight")
            lora[f"{name}.{ends[0]}"] = 0.1 * self.draw(4, 256)
            lora[f"{name}.{ends[1]}"] = 0.1 * self.draw(out, 4)
        return lora

    def make_lora_of_wan(self) -> dict[str, Any]:
        """In the makers' names, with alphas, a full difference and one of a bias."""
        lora: dict[str, Any] = {}
        for block in range(2):
            for module in ("self_attn.q", "self_attn.o", "cross_attn.k"):
                name = f"diffusion_model.blocks.{block}.{module}"
                lora[f"{name}.lora_down.weight"] = 0.1 * self.draw(4, 128)
                lora[f"{name}.lora_up.weight"] = 0.1 * self.draw(128, 4)
                lora[f"{name}.alpha"] = self.torch.tensor(2.0)
            lora[f"diffusion_model.blocks.{block}.self_attn.norm_q.diff"] = 0.1 * self.draw(128)
            lora[f"diffusion_model.blocks.{block}.ffn.2.diff_b"] = 0.1 * self.draw(128)
        return lora

    def sample(self, model: Any, sampler: str = "euler", scheduler: str = "simple", **more: Any) -> Any:
        options = {
            "steps": 2,
            "cfg": self.job.get("cfg", 5.0),
            "denoise": 1.0,
            "positive": self.prompts[0],
            "negative": self.prompts[1],
            "latent": {"samples": self.samples},
            **more,
        }
        positive, negative, latent = (options.pop(name) for name in ("positive", "negative", "latent"))
        steps, cfg = options.pop("steps"), options.pop("cfg")
        ended = self.nodes.common_ksampler(
            model, 11, steps, cfg, sampler, scheduler, positive, negative, latent, **options
        )
        return ended[0]["samples"]

    def with_lora(self, model: Any, strength: float = 0.8) -> Any:
        import comfy.sd

        found = comfy.sd.load_lora_for_models(model, None, dict(self.lora), strength, 0)[0]
        assert len(found.patches) == len({name.split(".lora_")[0].split(".alpha")[0] for name in self.lora})
        return found


# Samplers that look back at a step before the last.
LOOKING_BACK = ("dpmpp_2m", "uni_pc", "res_multistep")


def sampler(name: str) -> Graph:
    return lambda graphs, model: graphs.sample(model, name, steps=3 if name in LOOKING_BACK else 2)


def sample_with_shift(graphs: Graphs, model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    return graphs.sample(ModelSamplingSD3().patch(model, 3.0)[0], scheduler="beta")


def batch(graphs: Graphs, model: Any) -> Any:
    return graphs.sample(model, steps=2, latent={"samples": graphs.torch.cat([graphs.samples] * 2)})


def sample_masked_latents(graphs: Graphs, model: Any) -> Any:
    height, width = (8 * size for size in graphs.samples.shape[-2:])
    mask = graphs.torch.zeros(1, height, width)
    mask[:, height // 4 : height // 2] = 1.0
    return graphs.sample(model, steps=2, denoise=0.6, latent={"samples": graphs.given, "noise_mask": mask})


def in_two(graphs: Graphs, model: Any) -> Any:
    first = graphs.sample(model, steps=3, start_step=0, last_step=2, force_full_denoise=False)
    return graphs.sample(model, steps=3, start_step=2, last_step=3, disable_noise=True, latent={"samples": first})


def one_lora(graphs: Graphs, model: Any) -> Any:
    return graphs.sample(graphs.with_lora(model), steps=2)


def two_loras(graphs: Graphs, model: Any) -> Any:
    """With one whose weights core alone knows how to merge."""
    import comfy.sd

    mid = {"diffusion_model.blocks.1.ffn.0.diff": 0.05 * graphs.torch.ones(256, 128)}
    twice = graphs.with_lora(graphs.with_lora(model, 0.5), -0.3)
    return graphs.sample(comfy.sd.load_lora_for_models(twice, None, mid, 0.7, 0)[0], steps=2)


def guider(graphs: Graphs, model: Any) -> Any:
    """SamplerCustomAdvanced, with DualCFGGuider."""
    import comfy.samplers
    from comfy_extras import nodes_custom_sampler as custom

    chosen = custom.Guider_DualCFG(model)
    chosen.set_conds(graphs.prompts[0], graphs.prompts[2], graphs.prompts[1])
    chosen.set_cfg(4.0, 2.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "beta", 2)
    noise = custom.Noise_RandomNoise(3)
    latent = {"samples": graphs.samples}
    found = custom.SamplerCustomAdvanced.execute(noise, chosen, comfy.samplers.sampler_object("euler"), sigmas, latent)
    return found.result[0]["samples"]


def sample_timed_prompts(graphs: Graphs, model: Any) -> Any:
    """ConditioningCombine of two prompts, each for a part of the steps."""
    import node_helpers

    ranges = ((0.0, 0.5), (0.3, 1.0))
    both = [
        one
        for prompt, (start, end) in zip((graphs.prompts[0], graphs.prompts[2]), ranges, strict=True)
        for one in node_helpers.conditioning_set_values(prompt, {"start_percent": start, "end_percent": end})
    ]
    return graphs.sample(model, steps=4, positive=both)


def regions(graphs: Graphs, model: Any) -> Any:
    """One prompt for a part of the picture, one behind a mask: rows of other sizes, and weights of theirs."""
    import node_helpers

    height, width = graphs.samples.shape[-2:]
    mask = graphs.torch.zeros(1, 8 * height, 8 * width)
    mask[..., : 4 * width] = 1.0
    both = [
        *node_helpers.conditioning_set_values(graphs.prompts[0], {"area": (4, 4, 2, 1), "strength": 0.8}),
        *node_helpers.conditioning_set_values(graphs.prompts[2], {"mask": mask, "mask_strength": 1.0}),
    ]
    return graphs.sample(model, positive=both, steps=2)


def context_windows(graphs: Graphs, model: Any) -> Any:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    windowed = WanContextWindowsManualNode.execute(model, 17, 5, "standard_static", 1, False, "pyramid", False)
    return graphs.sample(windowed.result[0], latent={"samples": graphs.torch.zeros(1, 16, 9, 8, 6)}, steps=2)


def unlike_prompts(graphs: Graphs, model: Any) -> Any:
    """One has glyphs; of the other, which has none, the last tokens do not count."""
    states, info = graphs.prompts[1][0]
    mask = graphs.torch.ones(1, states.shape[1], dtype=graphs.torch.int64)
    mask[:, -7:] = 0
    info = {name: value for name, value in info.items() if name != "conditioning_byt5small"}
    return graphs.sample(model, steps=2, negative=[[states, {**info, "attention_mask": mask}]])


def first_frame(graphs: Graphs, model: Any) -> Any:
    """As Wan22ImageToVideoLatent: the first latent frame is given."""
    mask = graphs.torch.ones(1, 1, *graphs.samples.shape[2:])
    mask[:, :, 0] = 0.0
    return graphs.sample(model, steps=2, latent={"samples": graphs.given, "noise_mask": mask})


CASES: dict[str, Graph] = {
    **{name: sampler(name) for name in ("euler", "dpmpp_2m", "uni_pc", "res_multistep", "dpmpp_sde")},
    "another shift": sample_with_shift,
    "a batch of two": batch,
    "from latents, masked": sample_masked_latents,
    "two samplers": in_two,
    "a LoRA": one_lora,
    "LoRAs": two_loras,
    "a guider": guider,
    "timed prompts": sample_timed_prompts,
    "regions": regions,
    "context windows": context_windows,
    "a first frame": first_frame,
    "unlike prompts": unlike_prompts,
    **core_rows.CASES,
}


if __name__ == "__main__":
    main(*sys.argv[1:])

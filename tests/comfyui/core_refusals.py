"""Run in a process of its own: core's nodes that patch a MODEL, on core's torch MODEL of a file and on ours.

Arguments: ComfyUI's folder and the file of a miniature of Wan. Each node either gives what core gives, or is refused
with a sentence before the first step. Prints by node what became of it, a relative L2 or the sentence, as JSON, last.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

# By node: the module below `comfy_extras`, and what it takes beside a MODEL.
NODES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "HyperTile": ("hypertile", {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False}),
    "TomePatchModel": ("tomesd", {"ratio": 0.3}),
    "FreeU": ("freelunch", {"b1": 1.1, "b2": 1.2, "s1": 0.9, "s2": 0.2}),
    "FreeU_V2": ("freelunch", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
    "PatchModelAddDownscale": (
        "model_downscale",
        {
            "block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.35,
            "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic",
        },
    ),
    "PerturbedAttentionGuidance": ("pag", {"scale": 3.0}),
    "SelfAttentionGuidance": ("sag", {"scale": 0.5, "blur_sigma": 2.0}),
    "SkipLayerGuidanceDiT": (
        "slg",
        {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "double_layers": "0", "single_layers": "0"},
    ),
    "SkipLayerGuidanceDiTSimple": (
        "slg", {"start_percent": 0.0, "end_percent": 1.0, "double_layers": "0", "single_layers": "0"},
    ),
    "SkipLayerGuidanceSD3": ("sd3", {"layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}),
    "NAGuidance": ("nag", {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}),
    "ScaleROPE": (
        "rope", {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0},
    ),
    "TorchCompileModel": ("torch_compile", {"backend": "inductor"}),
    "UNetSelfAttentionMultiply": ("attention_multiply", {"q": 1.1, "k": 1.0, "v": 1.0, "out": 1.0}),
    "UNetCrossAttentionMultiply": ("attention_multiply", {"q": 1.1, "k": 1.0, "v": 1.0, "out": 1.0}),
    "RescaleCFG": ("model_advanced", {"multiplier": 0.7}),
    "CFGZeroStar": ("cfg", {}),
    "CFGNorm": ("cfg", {"strength": 1.0}),
    "APG": ("apg", {"eta": 1.0, "norm_threshold": 5.0, "momentum": 0.0}),
    "TCFG": ("tcfg", {}),
    "Mahiro": ("mahiro", {}),
    "EpsilonScaling": ("eps", {"scaling_factor": 1.005}),
    "TemporalScoreRescaling": ("eps", {"tsr_k": 0.95, "tsr_sigma": 1.0}),
    "RenormCFG": ("lumina2", {"cfg_trunc": 100.0, "renorm_cfg": 1.0}),
    "DifferentialDiffusion": ("differential_diffusion", {"strength": 1.0}),
    "ModelSamplingSD3": ("model_advanced", {"shift": 3.0}),
    "ModelComputeDtype": ("model_advanced", {"dtype": "fp32"}),
    "ModelAttentionBackend": ("model_advanced", {"attention": "pytorch attention"}),
    "ModelNoiseScale": ("model_advanced", {"noise_scale": 1.5}),
    "ModelSamplingAuraFlow": ("model_advanced", {"shift": 1.73}),
    "ModelSamplingFlux": ("model_advanced", {"max_shift": 1.15, "base_shift": 0.5, "width": 64, "height": 48}),
    "ModelSamplingContinuousEDM": ("model_advanced", {"sampling": "eps", "sigma_max": 120.0, "sigma_min": 0.002}),
    "ModelSamplingDiscrete": ("model_advanced", {"sampling": "v_prediction", "zsnr": False}),
    "CFGOverride": ("custom_sampler", {"cfg": 1.0, "start_percent": 0.0, "end_percent": 0.6}),
    "FreSca": ("fresca", {"scale_low": 1.1, "scale_high": 1.3, "freq_cutoff": 2}),
    "VideoLinearCFGGuidance": ("video_model", {"min_cfg": 1.0}),
    "VideoTriangleCFGGuidance": ("video_model", {"min_cfg": 1.0}),
    "PerpNeg": ("perpneg", {"empty_conditioning": [[0.4 * torch.ones(1, 512, 4096), {}]], "neg_scale": 1.0}),
    "ChromaRadianceOptions": (
        "chroma_radiance",
        {
            "preserve_wrapper": True, "start_sigma": 1.0, "end_sigma": 0.0, "nerf_tile_size": 8,
            "force_sequential_txt_ids": True,
        },
    ),
    "LTXVSpatioTemporalGuidance": (
        "lt", {"scale": 1.0, "blocks": "1", "start_percent": 0.0, "end_percent": 1.0},
    ),
}  # fmt: skip


def main(comfyui: str, path: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    with torch.inference_mode():
        models = Models(path)
        uses = {
            **{name: models.by_node(name) for name in NODES},
            "LoraLoaderBypass": models.bypassed,
            "hooks": models.hooked,
            "ControlNet": models.controlled,
        }
        found = {name: models.became(use) for name, use in uses.items()}
        models.check_cancel()
    print(json.dumps(found))


class Models:
    """Both, what they sample, and what ours was asked since it was forgotten: `asked`."""

    def __init__(self, path: str) -> None:
        import comfy.model_management
        import comfy.sd
        import torch
        from comfyui_tpu.nodes.comfyui import core_model
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        class Watched(SilentProgress):
            check_cancelled = staticmethod(comfy.model_management.throw_exception_if_processing_interrupted)

        self.asked: list[str] = []
        self.cancel_at, ask = 0, core_model.run_stage

        def noted(stage: str, *args: Any, **more: Any) -> Any:
            self.asked.append(stage)
            if len(self.asked) == self.cancel_at:
                comfy.model_management.interrupt_current_processing()
            return ask(stage, *args, **more)

        core_model.run_stage = noted
        torch.manual_seed(2)
        self.prompts = [[[0.4 * torch.randn(1, 512, 4096), {}]] for _ in range(2)]
        self.latent = {"samples": torch.zeros(1, 16, 3, 8, 6)}
        self.theirs = comfy.sd.load_diffusion_model(path, {"dtype": torch.float32})
        self.ours = core_model.load_model(path, "float32", Watched)

    def sample(self, model: Any, positive: Any = None, steps: int = 2) -> Any:
        import nodes

        both = positive or self.prompts[0], self.prompts[1]
        return nodes.common_ksampler(model, 5, steps, 4.0, "euler", "simple", *both, self.latent)[0]["samples"]

    def became(self, use: Callable[[Any], Any]) -> float | str:
        self.asked.clear()
        found, own = attempt(use, self.ours)
        number = len(self.asked)
        if own is None:
            wanted = use(self.theirs)
            return ((found - wanted).norm() / wanted.norm()).item()
        if type(own) is ValueError and "TPU" in str(own):
            assert number == 0, (own, number)
            return str(own)
        _, error = attempt(use, self.theirs)
        if (type(error), str(error)) != (type(own), str(own)):
            raise own
        return f"as core: {type(own).__name__}"

    def by_node(self, name: str) -> Callable[[Any], Any]:
        module, inputs = NODES[name]
        kind = getattr(importlib.import_module(f"comfy_extras.nodes_{module}"), name)

        def use(model: Any) -> Any:
            if hasattr(kind, "execute"):
                return self.sample(kind.execute(model=model, **inputs).result[0])
            return self.sample(getattr(kind(), kind.FUNCTION)(model, **inputs)[0])

        return use

    def hooked(self, model: Any) -> Any:
        """CreateHookLora and ConditioningSetProperties, say."""
        import comfy.hooks
        import torch

        lora = {"diffusion_model.blocks.0.self_attn.q.diff": torch.ones(128, 128)}
        hooks = comfy.hooks.create_hook_lora(lora, 1.0, 1.0)
        return self.sample(model, comfy.hooks.set_hooks_for_conditioning(self.prompts[0], hooks))

    def bypassed(self, model: Any) -> Any:
        """LoraLoaderBypass and LoraLoaderBypassModelOnly."""
        import comfy.sd
        import torch

        names = {"lora_A": (2, 128), "lora_B": (128, 2)}
        lora = {
            f"diffusion_model.blocks.0.self_attn.q.{name}.weight": torch.ones(shape) for name, shape in names.items()
        }
        return self.sample(comfy.sd.load_bypass_lora_for_models(model, None, lora, 1.0, 0.0)[0])

    def controlled(self, model: Any) -> Any:
        """ControlNetApplyAdvanced and alike."""
        return self.sample(model, [[self.prompts[0][0][0], {"control": Control(), "control_apply_to_uncond": True}]])

    def check_cancel(self) -> None:
        """The step in which the user cancels is the last that is asked for."""
        import comfy.model_management

        self.asked.clear()
        self.cancel_at = 3
        try:
            self.sample(self.ours, steps=500)
        except comfy.model_management.InterruptProcessingException:
            assert len(self.asked) == 3, self.asked
        else:
            raise AssertionError("nothing was cancelled")


def attempt(use: Callable[[Any], Any], model: Any) -> tuple[Any, Exception | None]:
    try:
        return use(model), None
    except Exception as error:
        return None, error


class Control:
    """As much of a ControlNet as core asks of one before it runs."""

    previous_controlnet = None
    extra_hooks = None
    multigpu_clones: Mapping[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "get_control":
            raise AssertionError("the ControlNet was run")
        return lambda *args, **more: [] if name.startswith("get") else 0


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run in a process of its own: control networks beside a denoiser, core's in torch and ours, in core's own nodes.

Arguments: ComfyUI's folder and a job as JSON: a denoiser's `path`, its `kind`, and the `cases`. Prints the relative L2
of the latents by case as JSON, last.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

STRIDE = 8


def main(comfyui: str, job: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "files"))
    said, errors = json.loads(job), {}
    with torch.inference_mode():
        networks = FAMILIES[said["kind"]](said)
        for name in said["cases"]:
            errors[name] = networks.compare(name)
            print(name, errors[name], file=sys.stderr)
        errors |= networks.refusals()
    print(json.dumps(errors))


class Vae:
    """As much of a VAE as the nodes ask: latents that depend on every pixel."""

    def __init__(self, frames: bool) -> None:
        import torch

        self.frames = frames
        self.mix = torch.randn(3 * STRIDE * STRIDE, 16, generator=torch.Generator().manual_seed(1)) / 8
        self.downscale_ratio = STRIDE

    def spacial_compression_encode(self) -> int:
        return STRIDE

    def encode(self, images: Any) -> Any:
        number, height, width = images.shape[0], images.shape[1] // STRIDE, images.shape[2] // STRIDE
        cells = images[:, : height * STRIDE, : width * STRIDE, :3].reshape(number, height, STRIDE, width, STRIDE, 3)
        latents = (cells.permute(0, 1, 3, 2, 4, 5).flatten(3) @ self.mix).permute(0, 3, 1, 2).contiguous()
        return latents[:, :, None] if self.frames else latents


class Family:
    """Both MODELs of a denoiser, and what is sampled with them."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        import comfy.sd
        import jax
        import torch
        from comfyui_tpu.nodes.comfyui import core_model
        from comfyui_tpu.tpu_runtime.engine.engine import Engine
        from comfyui_tpu.tpu_runtime.progress import SilentProgress

        self.engines: dict[int, Any] = {}
        self.chips = 1

        def run_stage(stage: str, model: Any, host: Any, **arguments: Any) -> Any:
            if self.chips not in self.engines:
                self.engines[self.chips] = Engine(jax.devices()[: self.chips])
            return self.engines[self.chips].run(stage, model, host(), **arguments)

        core_model.run_stage = run_stage
        self.theirs = comfy.sd.load_diffusion_model(job["path"], {"dtype": torch.float32})
        self.ours = core_model.load_model(job["path"], "float32", SilentProgress)
        self.draw = draw = lambda *shape: torch.randn(*shape, generator=self.generator)
        self.generator = torch.Generator().manual_seed(5)
        self.prompts = [[[0.4 * draw(1, length, 96), {}]] for length in (40, 17)]
        self.images = [torch.rand(*size, 3, generator=self.generator) for size in ((1, 56, 64), (1, 56, 64))]
        self.fitting = torch.rand(2, 80, 64, 3, generator=self.generator)
        self.pair = torch.rand(2, 72, 56, 3, generator=self.generator)
        self.mask = (torch.rand(1, 56, 64, generator=self.generator) > 0.4).float()
        self.networks: dict[str, tuple[Any, Any]] = {}

    def latents(self, batch: int) -> Any:
        raise NotImplementedError

    def sample(
        self, model: Any, *, batch: int = 1, cfg: float = 3.0, positive: Any = None, negative: Any = None
    ) -> Any:
        import nodes

        both = positive or self.prompts[0], negative or self.prompts[1]
        latent = {"samples": self.latents(batch)}
        return nodes.common_ksampler(model, 11, 2, cfg, "euler", "simple", *both, latent)[0]["samples"]

    def compare(self, name: str) -> float:
        """Relative L2 of ours to core's."""
        self.chips, use = self.cases()[name]
        theirs, found = use(self.theirs, 0), use(self.ours, 1)
        assert found.shape == theirs.shape and found.isfinite().all()
        return ((found - theirs).norm() / theirs.norm()).item()

    def cases(self) -> Mapping[str, tuple[int, Callable[[Any, int], Any]]]:
        raise NotImplementedError

    def refusals(self) -> dict[str, str]:
        return {}


def fill(network: Any, seed: int) -> None:
    """Random weights; those of norms are near one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name or "rms" in name
        parameter.data = 1 + 0.1 * values if is_norm else values / max(1, parameter[0].numel()) ** 0.5


class ZImage(Family):
    """Z-Image with Fun ControlNets, by ZImageFunControlnet."""

    KINDS: Mapping[str, Mapping[str, Any]] = {
        "version 1": {"n_control_layers": 6},
        "lite": {"n_control_layers": 3, "additional_in_dim": 17, "refiner_control": True},
        "version 2.1": {"n_control_layers": 15, "additional_in_dim": 17, "refiner_control": True},
        "version 2.0": {"n_control_layers": 15, "additional_in_dim": 17, "refiner_control": True, "broken": True},
    }

    def __init__(self, job: Mapping[str, Any]) -> None:
        import comfy.ldm.lumina.model as lumina
        import comfy.supported_models
        import narrow

        narrow.WIDTH, narrow.AXES, make = 96, (8, 12, 12), lumina.TimestepEmbedder
        # Its hidden layer is as wide as that of diffusers at every size.
        lumina.TimestepEmbedder = lambda width, **options: make(1024, **{**options, "output_size": width})
        comfy.supported_models.ZImage.unet_config = {**comfy.supported_models.ZImage.unet_config, "dim": 96}
        super().__init__(job)
        self.vae = Vae(frames=False)

    def latents(self, batch: int) -> Any:
        import torch

        return torch.zeros(batch, 16, 9, 7)

    def network(self, kind: str) -> tuple[Any, Any]:
        """Core's model patch and ours, of the same weights."""
        if kind not in self.networks:
            import comfy.ldm.lumina.controlnet
            import comfy.model_patcher
            import comfy.ops
            import torch
            from comfyui_tpu.nodes.comfyui import core_control_patches
            from safetensors.torch import save_file

            network = comfy.ldm.lumina.controlnet.ZImage_Control(
                dim=96, n_heads=3, n_kv_heads=3, dtype=torch.float32, device=torch.device("cpu"),
                operations=comfy.ops.disable_weight_init, **self.KINDS[kind],
            )  # fmt: skip
            fill(network, 1 + len(self.networks))
            if kind == "version 2.0":
                network.control_noise_refiner[0].after_proj.weight.data.zero_()
            path = Path(f"{kind.replace(' ', '_')}.safetensors").absolute()
            save_file(as_published(network.state_dict()), path)
            cpu = torch.device("cpu")
            theirs = comfy.model_patcher.CoreModelPatcher(network, load_device=cpu, offload_device=cpu)
            self.networks[kind] = theirs, core_control_patches.load_patch(str(path))
        return self.networks[kind]

    def apply(self, model: Any, whose: int, kind: str, strength: float, **inputs: Any) -> Any:
        from comfy_extras.nodes_model_patch import ZImageFunControlnet

        patch = self.network(kind)[whose]
        return ZImageFunControlnet().diffsynth_controlnet(model, patch, self.vae, strength=strength, **inputs)[0]

    def cases(self) -> Mapping[str, tuple[int, Callable[[Any, int], Any]]]:
        image, other = self.images
        everything = {"image": image, "inpaint_image": other, "mask": self.mask}

        # Of the latents' size, padded to whole patches: where core scales images of two patches in its first step, each
        # forgets what the other has computed so far.
        fitting = self.fitting[:1]

        def two(model: Any, whose: int) -> Any:
            first = self.apply(model, whose, "version 1", 0.6, image=fitting)
            second = self.apply(first, whose, "lite", -0.4, inpaint_image=self.fitting[1:], mask=self.mask)
            return self.sample(second, cfg=1.0)

        return {
            "version 1, 2 chips": (
                2, lambda model, whose: self.sample(self.apply(model, whose, "version 1", 0.7, image=image)),
            ),
            "version 1, a batch": (
                1, lambda model, whose: self.sample(self.apply(model, whose, "version 1", 1.0, image=image), batch=2),
            ),
            "version 1, an image for each row": (
                1,
                lambda model, whose: self.sample(
                    self.apply(model, whose, "version 1", 1.0, image=self.pair), batch=2, cfg=1.0
                ),
            ),
            "lite, inpainting, 3 chips": (
                3, lambda model, whose: self.sample(self.apply(model, whose, "lite", 0.8, **everything)),
            ),
            "lite, only an image to inpaint": (
                1,
                lambda model, whose: self.sample(
                    self.apply(model, whose, "lite", 0.8, inpaint_image=other, mask=self.mask), cfg=1.0
                ),
            ),
            "version 2.1, 8 chips": (
                8, lambda model, whose: self.sample(self.apply(model, whose, "version 2.1", 0.65, image=image)),
            ),
            "version 2.0, an image for each row": (
                1,
                lambda model, whose: self.sample(
                    self.apply(model, whose, "version 2.0", 0.65, image=self.pair), batch=2, cfg=1.0
                ),
            ),
            "two networks": (1, two),
        }  # fmt: skip

    def refusals(self) -> dict[str, str]:
        """Sentences about what is not computed, before the first step."""
        return {
            "core's loader": refused(lambda: self.sample(self.apply(self.ours, 0, "lite", 1.0, image=self.pair))),
            "core's model": refused(lambda: self.sample(self.apply(self.theirs, 1, "lite", 1.0, image=self.pair))),
        }


class QwenImage(Family):
    """Qwen-Image with ControlNets, by ControlNetApplyAdvanced and ControlNetInpaintingAliMamaApply, and patches."""

    # Of InstantX's the denoiser's blocks have a hint in common.
    KINDS: Mapping[str, Mapping[str, Any]] = {
        "union": {"num_layers": 20},
        "inpainting": {"num_layers": 10, "extra_condition_channels": 4},
        "fun": {},
        "canny": {"num_layers": 14},
        "patch to inpaint": {"num_layers": 14, "additional_in_dim": 4},
    }

    def __init__(self, job: Mapping[str, Any]) -> None:
        import narrow  # noqa: F401

        super().__init__(job)
        self.vae = Vae(frames=True)

    def latents(self, batch: int) -> Any:
        import torch

        return torch.zeros(batch, 16, 1, 9, 7)

    def network(self, kind: str) -> tuple[Any, Any]:
        """Core's CONTROL_NET and ours, of the same weights."""
        if kind not in self.networks:
            from comfyui_tpu.nodes.comfyui import core_control_nets, core_control_patches
            from safetensors.torch import save_file

            network = self.make(kind)
            fill(network, 1 + len(self.networks))
            path = Path(f"{kind.replace(' ', '_')}.safetensors").absolute()
            save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)
            load = core_control_patches.load_patch if self.is_patch(kind) else core_control_nets.load_control_net
            self.networks[kind] = self.wrap(kind, network), load(str(path))
        return self.networks[kind]

    def is_patch(self, kind: str) -> bool:
        return "num_layers" in self.KINDS[kind] and self.KINDS[kind]["num_layers"] == 14

    def make(self, kind: str) -> Any:
        """Core's network, in the denoiser's sizes."""
        import comfy.ldm.qwen_image.controlnet
        import comfy.ops
        import torch
        from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet

        own = {
            "dtype": torch.float32, "device": torch.device("cpu"), "operations": comfy.ops.disable_weight_init,
            **self.KINDS[kind],
        }  # fmt: skip
        if self.is_patch(kind):
            return QwenImageBlockWiseControlNet(dim=256, **own)
        sizes = {"attention_head_dim": 128, "num_attention_heads": 2}
        if kind == "fun":
            return comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel(inner_dim=256, **sizes, **own)
        return comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(joint_attention_dim=96, **sizes, **own)

    def wrap(self, kind: str, network: Any) -> Any:
        """Core's object of a network."""
        import comfy.controlnet
        import comfy.latent_formats
        import comfy.model_patcher
        import torch

        cpu = torch.device("cpu")
        if self.is_patch(kind):
            return comfy.model_patcher.CoreModelPatcher(network, load_device=cpu, offload_device=cpu)
        made = comfy.controlnet.QwenFunControlNet if kind == "fun" else comfy.controlnet.ControlNet
        return made(
            network, compression_ratio=1, latent_format=comfy.latent_formats.Wan21(),
            concat_mask=kind == "inpainting", load_device=cpu, extra_conds=[],
        )  # fmt: skip

    def patched(self, model: Any, whose: int, kind: str, strength: float, **inputs: Any) -> Any:
        from comfy_extras.nodes_model_patch import QwenImageDiffsynthControlnet

        given = {"image": self.images[0], **inputs}
        patch = self.network(kind)[whose]
        return QwenImageDiffsynthControlnet().diffsynth_controlnet(model, patch, self.vae, strength=strength, **given)[
            0
        ]

    def controlled(
        self, model: Any, whose: int, kind: str, *values: float, prompts: Any = None, mask: Any = None, **options: Any
    ) -> Any:
        """Sample with a ControlNet of this strength and, if given, range of steps."""
        from comfy_extras.nodes_controlnet import ControlNetInpaintingAliMamaApply

        import nodes

        strength, start, end = (*values, 0.0, 1.0)[:3] if len(values) == 1 else values
        given = (*(prompts or self.prompts), self.network(kind)[whose])
        if mask is not None:
            applied = ControlNetInpaintingAliMamaApply.execute(
                *given, self.vae, self.images[0], mask, strength, start, end
            ).result
        else:
            applied = nodes.ControlNetApplyAdvanced().apply_controlnet(
                *given, options.pop("image", self.images[0]), strength, start, end, vae=self.vae
            )
        positive, negative = applied
        if "then" in options:
            return self.controlled(model, whose, *options.pop("then"), prompts=applied, **options)
        return self.sample(model, positive=positive, negative=negative, **options)

    def cases(self) -> Mapping[str, tuple[int, Callable[[Any, int], Any]]]:
        use = self.controlled
        return {
            "union, 2 chips": (2, lambda model, whose: use(model, whose, "union", 0.7)),
            "union, a part of the steps, 3 chips": (
                3, lambda model, whose: use(model, whose, "union", 0.7, 0.0, 0.3, cfg=1.0),
            ),
            "union, an image for each row": (
                1, lambda model, whose: use(model, whose, "union", 1.0, image=self.pair, batch=2, cfg=1.0),
            ),
            "inpainting, 8 chips": (8, lambda model, whose: use(model, whose, "inpainting", 0.8, mask=self.mask)),
            "inpainting without a mask": (1, lambda model, whose: use(model, whose, "inpainting", 0.8, cfg=1.0)),
            "union in a part of the steps, then inpainting": (
                1,
                lambda model, whose: use(
                    model, whose, "union", 0.6, 0.0, 0.3, then=("inpainting", 0.5), mask=self.mask, cfg=1.0
                ),
            ),
            "Fun, 3 chips": (3, lambda model, whose: use(model, whose, "fun", 0.7)),
            "a canny patch, 2 chips": (2, lambda model, whose: self.sample(self.patched(model, whose, "canny", 0.7))),
            "a patch to inpaint and a ControlNet": (
                1,
                lambda model, whose: use(
                    self.patched(model, whose, "patch to inpaint", -0.5, mask=self.mask), whose, "union", 0.6, cfg=1.0
                ),
            ),
        }  # fmt: skip

    def refusals(self) -> dict[str, str]:
        """Sentences about what is not computed, before the first step."""
        return {
            "core's loader": refused(lambda: self.controlled(self.ours, 0, "union", 1.0)),
            "core's patch": refused(lambda: self.sample(self.patched(self.ours, 0, "canny", 1.0))),
            "core's model": refused(lambda: self.controlled(self.theirs, 1, "union", 1.0)),
        }


def refused(use: Callable[[], Any]) -> str:
    try:
        use()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def as_published(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Core's names and joined projections of Z-Image as alibaba-pai publishes them."""
    published = {}
    for name, tensor in tensors.items():
        if ".qkv." in name:
            for part, letter in zip(tensor.chunk(3), "qkv", strict=True):
                published[name.replace("qkv", f"to_{letter}")] = part.contiguous().clone()
            continue
        for theirs, own in (("attention.out", "attention.to_out.0"), ("q_norm", "norm_q"), ("k_norm", "norm_k")):
            name = name.replace(theirs, own)
        published[name] = tensor.contiguous().clone()
    return published


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Family]] = {
    "ZImageTransformer2DModel": ZImage,
    "QwenImageTransformer2DModel": QwenImage,
}

if __name__ == "__main__":
    main(*sys.argv[1:])

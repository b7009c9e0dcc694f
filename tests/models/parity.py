"""What the parity tests of all families share: upstream's pipeline, our engine, one call of the denoiser.

The oracle is a diffusers pipeline over the tiny checkpoint, on the CPU in float32; `compare` (conftest) judges.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.attention.policy import AttentionPolicy
from comfyui_tpu.diagnostics.selftest.families import NoPromptCache
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine.stage_values import Conditioning
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.programs import denoise_step, sharded_ops, solver_table, upstream_network
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget, Program
from comfyui_tpu.tpu_runtime.programs.weights import Weights
from comfyui_tpu.tpu_runtime.progress import SilentProgress


def tiny_model(spec: ModelSpec) -> ModelRef:
    """The built-in checkpoint of `spec` in float32."""
    return ModelRef(spec_name=spec.name, model_id=spec.miniature.random_id, precision="float32")


@functools.cache
def engine(chips: int) -> Runner:
    """One engine for each number of simulated chips, for all tests of the process."""
    return Runner(jax.devices()[:chips])


def encode_anew(chips: int, model: ModelRef, prompt: str, negative_prompt: str) -> tuple[Conditioning, Any]:
    """Encode a prompt on so many chips, also if others have encoded it: the cache of prompts does not ask by which."""
    with mock.patch.object(engine(chips), "prompt_cache", NoPromptCache()):
        return engine(chips).encode(model, prompt, negative_prompt, SilentProgress())


def upstream(pipeline_class: str, folder: Path, **parts: Any) -> Any:
    """The diffusers pipeline of a checkpoint; `parts` take the place of what the folder holds."""
    import diffusers

    pipe = getattr(diffusers, pipeline_class).from_pretrained(folder, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class Result:
    """Of a whole generation: the last latents, as the denoiser has them, and the frames or the picture in 0..1."""

    latents: np.ndarray
    frames: np.ndarray


def generate(pipe: Any, settings: Settings, **arguments: Any) -> Result:
    """What a pipeline gives for `settings`; `arguments` are those that not every pipeline has, and the prompts."""
    samples: list[torch.Tensor] = []
    step = pipe.scheduler.step

    @functools.wraps(step)  # pipelines ask for its parameters
    def keep(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        samples[:] = [result[0]]
        return result

    with torch.no_grad(), mock.patch.object(pipe.scheduler, "step", keep):
        output = pipe(
            height=settings.height, width=settings.width, num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale, generator=torch.Generator().manual_seed(settings.seed),
            output_type="np", **arguments,
        )[0]  # fmt: skip
    # Videos come as several, of which there is one.
    return Result(latents=samples[0].numpy(), frames=output[0] if output.ndim == 5 else output)


def random_latents(spec: ModelSpec, settings: Settings) -> torch.Tensor:
    """A sample for one call of the denoiser, `[1, channels, ...]`."""
    return torch.randn(spec.geometry.latent_shape(settings), generator=torch.Generator().manual_seed(5))


def denoise_once(
    spec: ModelSpec,
    settings: Settings,
    sample: torch.Tensor,
    inputs: Mapping[str, np.ndarray],
    *,
    timestep: int | float,
    next_timestep: int | float = 0,
    chips: int = 8,
    mesh: MeshShape | None = None,
    expert: str = "transformer",
    changes: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Compute the guided output of our denoiser; see `compile_denoiser`. Compiled and loaded anew at each call."""
    denoiser = compile_denoiser(
        spec, settings, inputs, timestep=timestep, next_timestep=next_timestep, chips=chips, mesh=mesh, expert=expert,
        changes=changes,
    )  # fmt: skip
    return denoiser(sample, inputs)


def compile_denoiser(
    spec: ModelSpec,
    settings: Settings,
    inputs: Mapping[str, np.ndarray],
    *,
    timestep: int | float,
    next_timestep: int | float = 0,
    chips: int = 8,
    mesh: MeshShape | None = None,
    expert: str = "transformer",
    changes: Mapping[str, Any] | None = None,
) -> Callable[[torch.Tensor, Mapping[str, np.ndarray]], np.ndarray]:
    """Return a function from a sample and inputs to our denoiser's guided output.

    It is one step of an Euler solver, which shows the output as it is. With `changes` of the config the weights are
    drawn, not those of the miniature.

    `inputs` are those of `model_spec.Forward`, a row for each branch, of the shapes that the function will get;
    `mesh` is another arrangement of chips than the model's own.
    """
    kind = np.int32 if isinstance(timestep, int) else np.float32
    times = np.array([timestep, next_timestep], kind)
    solver = solver_table.SolverTable(timesteps=times[:1], table=np.array([[[0.0, 1.0]] * 2], np.float32))
    target = CompileTarget(devices=tuple(jax.devices()[: mesh.num_devices if mesh else chips]), precision="float32")
    found = checkpoint.locate(spec, spec.miniature.random_id)
    config = {**found.config(spec.component(expert), SilentProgress()), **(changes or {})}
    references = {name: x.shape for name, x in inputs.items() if name.startswith("reference_")}
    shape = denoise_step.StepShape(
        latent_shape=spec.geometry.latent_shape(settings), branches=spec.branches(settings.guidance_scale),
        quality=settings.quality, num_memory=0, timestep_dtype=times.dtype, mesh_shape=mesh, references=references,
    )  # fmt: skip
    program = denoise_step.build_denoise_program(spec, config, target, shape)
    weights = tiny_weights(spec, expert, program) if changes is None else drawn_weights(program)
    compiled = program.compile()

    def denoise(sample: torch.Tensor, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        args = denoise_step.StepArgs(
            (sample.numpy(),), solver.table[0], *times, dict(inputs), np.float32(settings.guidance_scale)
        )
        placed = jax.tree.map(lambda value, want: jax.device_put(value, want.sharding), args, program.args)
        return np.asarray(compiled(weights, *placed)[0])

    return denoise


def drawn_weights(program: Program) -> Weights:
    """Of deviation 0.05, the same each time; those of norms around 1."""
    random = np.random.default_rng(11)
    return {
        name: jax.device_put(
            random.normal("norm" in name and "weight" in name, 0.05, want.shape).astype(want.dtype), want.sharding
        )
        for name, want in (program.weights or {}).items()
    }


def tiny_weights(spec: ModelSpec, component: str, program: Program) -> Weights:
    """A component of the tiny checkpoint, laid out as `program` takes it."""
    found, part = checkpoint.locate(spec, spec.miniature.random_id), spec.component(component)
    folder = found.folder(part.folder, SilentProgress())
    network = upstream_network.build_network(part, found.config(part, SilentProgress()))
    files = checkpoint.match_weights(network, checkpoint.read_headers(folder, network.component), folder)
    return weight_loader.load_weights(network, files, program.weights, component, SilentProgress())


def poison_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the tokens that only fill up the chips' shares are NaN: whatever reads one becomes NaN."""
    pad = sharded_ops.ShardedOps.pad

    @sharded_ops.accept_tensors
    def poison(self: sharded_ops.ShardedOps, x: jax.Array, parts: int = 1) -> jax.Array:
        padded = pad(self, x, parts)
        real = jnp.arange(padded.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2)) < x.shape[1]
        return jnp.where(real, padded, jnp.nan)

    monkeypatch.setattr(sharded_ops.ShardedOps, "pad", poison)


def use_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on denoisers are built with the attention kernel, which runs in interpret mode without a TPU.

    With small tiles: its program, and the time to compile it, grow with them.
    """

    def choose(**how: Any) -> AttentionPolicy:
        policy = AttentionPolicy(**{**how, "kernel": "pallas"})
        form = AttentionConfig(
            scores=policy.scores, maximum=policy.maximum(policy.scores), block_q=128, step=32, online_step=32
        )
        return replace(policy, form=form)

    monkeypatch.setattr(denoise_step, "AttentionPolicy", choose)


def write_other_dimensions(spec: ModelSpec, folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> ModelRef:
    """Writes a tiny checkpoint whose components have `changes` in their configs, and says where it is."""
    components = tuple(replace(c, tiny=MappingProxyType({**c.tiny, **changes[c.name]})) for c in spec.components)
    tiny.write_random(replace(spec, components=components), folder, seed=3)
    return replace(tiny_model(spec), model_id=str(folder))

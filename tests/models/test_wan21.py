"""Wan 2.1 against `diffusers.WanPipeline` on the CPU in float32: every stage and the whole, on 1, 3 and 8 chips."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, load, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine.engine import Engine
from comfyui_tpu.tpu_runtime.models import spec_by_name, spec_for_family, wan21
from comfyui_tpu.tpu_runtime.programs import denoise_step, modules, solver_table, token_layout
from comfyui_tpu.tpu_runtime.programs.network_call import Program
from comfyui_tpu.tpu_runtime.programs.program import Target
from comfyui_tpu.tpu_runtime.programs.weights import Weights
from comfyui_tpu.tpu_runtime.progress import Silent
from comfyui_tpu.tpu_runtime.spec import Settings

SPEC = spec_for_family("Wan21")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.tiny_id, precision="float32")
CHIPS = (1, 3, 8)
# The vocabulary knows no Chinese.
SHORT, NEGATIVE = "cat", "blurred details, 过曝 overexposed"
LONG = " ".join([SPEC.texts["prompt"]] * 60)  # over 512 tokens
# Tokens: 3 * 5 * 7 = 105, then 2 * 4 * 7 = 56: neither divides by 8 (nor 105 by 4, nor 56 by 3).
ODD = Settings(height=80, width=112, num_frames=9, num_inference_steps=6, guidance_scale=5.0, seed=7, shift=5.0)
FLAT = Settings(height=64, width=112, num_frames=5, num_inference_steps=6, guidance_scale=1.0, seed=8, shift=3.0)
TALL = Settings(height=112, width=48, num_frames=5, num_inference_steps=6, guidance_scale=5.0, seed=9, shift=3.0)
CASES = {"odd": ODD, "flat": FLAT, "tall": TALL}


@dataclass(frozen=True)
class Oracle:
    embeds: np.ndarray
    latents: np.ndarray
    frames: np.ndarray


@functools.cache
def pipeline() -> Any:
    return load_pipeline(tiny.ensure(SPEC))


def load_pipeline(folder: Path) -> Any:
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder, tokenizer=umt5_tokenizer(folder))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def oracle(settings: Settings, prompt: str) -> Oracle:
    pipe = pipeline()
    pipe.scheduler = solver_table.scheduler_from({**SPEC.scheduler, "flow_shift": settings.shift})
    with torch.no_grad():
        embeds = torch.cat(pipe.encode_prompt(prompt, NEGATIVE, True, max_sequence_length=512))
        kept: dict[str, torch.Tensor] = {}

        def keep(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
            kept.update(tensors)
            return {}

        frames = pipe(
            prompt, NEGATIVE, height=settings.height, width=settings.width, num_frames=settings.num_frames,
            num_inference_steps=settings.num_inference_steps, guidance_scale=settings.guidance_scale,
            generator=torch.Generator().manual_seed(settings.seed), callback_on_step_end=keep, output_type="np",
        ).frames[0]  # fmt: skip
    return Oracle(embeds=embeds.numpy(), latents=kept["latents"].numpy(), frames=frames)


@pytest.mark.parametrize("name", ["wan2.1-t2v-14b", "wan2.2-i2v-a14b"])
def test_the_negative_prompt_is_the_makers_whole_one(name: str):
    """The digest of `sample_neg_prompt` in the makers' shared_config.py; every example has it too."""
    published = "ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e"
    text = spec_by_name(name).texts["negative_prompt"]
    assert hashlib.sha256(text.encode()).hexdigest() == published
    files = sorted((Path(__file__).parents[2] / "examples").rglob(f"{'wan21' if 't2v' in name else 'wan22'}_*.json"))
    assert len(files) == 3 and all(text in file.read_text("utf-8") for file in files)


@functools.cache
def engine(chips: int) -> Engine:
    return Engine(jax.devices()[:chips])


def normalised(samples: torch.Tensor) -> np.ndarray:
    mean, std = wan21.latent_stats(pipeline().vae.config)
    return ((samples - mean) / std).numpy()


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["one word", "over 512 tokens"])
def test_prompts_are_encoded_as_upstream_encodes_them(chips: int, prompt: str, compare: Callable):
    prompt_embeds, negative = engine(chips).encode(MODEL, prompt, NEGATIVE, Silent())
    ours = np.concatenate([prompt_embeds[0][0].numpy(), negative[0][0].numpy()])
    compare(f"embeddings, {chips} chips", ours, oracle(ODD, prompt).embeds)
    assert prompt_embeds[0][1]["length"] == {SHORT: 2, LONG: 512}[prompt]


@pytest.mark.parametrize("chips", CHIPS)
def test_one_denoiser_call_equals_upstreams(chips: int, compare: Callable):
    """One step of an Euler solver, which shows the network's output as it is."""
    euler = solver_table.SolverTable(
        timesteps=np.array([700], np.int32), table=np.array([[[0.0, 1.0]] * 2], np.float32)
    )
    settings = Settings(**{**ODD.__dict__, "num_inference_steps": 1})
    noise, text = latents_and_text(settings)
    run, weights = denoiser(chips, settings, euler)
    (ours,) = step(run, weights, (noise.numpy(),), euler, 0, text, settings)
    with torch.no_grad():
        cond, uncond = (
            pipeline().transformer(noise, torch.tensor([700]), torch.from_numpy(row[None]), return_dict=False)[0]
            for row in text
        )
    compare(f"denoiser, {chips} chips", ours, (uncond + settings.guidance_scale * (cond - uncond)).numpy())


@pytest.mark.parametrize("chips", [8, *(pytest.param(chips, marks=pytest.mark.slow) for chips in (1, 3))])
@pytest.mark.parametrize("case", ["odd", *(pytest.param(case, marks=pytest.mark.slow) for case in ("flat", "tall"))])
def test_latents_and_frames_equal_upstreams(chips: int, case: str, compare: Callable):
    settings, runner = CASES[case], engine(chips)
    expected = oracle(settings, SHORT)
    embeds = runner.encode(MODEL, SHORT, NEGATIVE, Silent())
    latents = runner.denoise(MODEL, settings, *embeds, Silent())
    compare(f"latents, {case}, {chips} chips", normalised(latents["samples"]), expected.latents)
    frames = runner.decode(MODEL, latents, Silent())
    compare(f"frames, {case}, {chips} chips", frames.numpy(), expected.frames)


@pytest.mark.slow
def test_bfloat16_stays_within_its_bound(compare: Callable):
    """Against the float32 oracle: rounding of 8 bits through 2 + 3 blocks, 6 steps and the VAE."""
    runner, expected = engine(8), oracle(FLAT, SHORT)
    model = ModelRef(spec_name=SPEC.name, model_id=SPEC.tiny_id, precision="bfloat16")
    embeds = runner.encode(model, SHORT, NEGATIVE, Silent())
    latents = runner.denoise(model, FLAT, *embeds, Silent())
    frames = runner.decode(model, latents, Silent())
    compare("embeddings, bfloat16", embeds[0][0][0].numpy(), expected.embeds[:1], error=3e-2, slope=3e-3)
    compare("latents, bfloat16", normalised(latents["samples"]), expected.latents, error=2e-2, slope=3e-3)
    compare("frames, bfloat16", frames.numpy(), expected.frames, error=5e-2, slope=3e-3)


def test_poisoned_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch, compare: Callable):
    """105 tokens on 4 chips: the three added ones may hold NaN."""
    euler = solver_table.SolverTable(
        timesteps=np.array([700], np.int32), table=np.array([[[0.0, 1.0]] * 2], np.float32)
    )
    noise, text = latents_and_text(ODD)
    clean, weights = denoiser(8, ODD, euler)
    expected = step(clean, weights, (noise.numpy(),), euler, 0, text, ODD)[0]
    pad_tokens = token_layout.TokenLayout.pad_tokens

    def poison(self: token_layout.TokenLayout, x: jax.Array) -> jax.Array:
        padded = pad_tokens(self, x)
        real = jnp.arange(padded.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2)) < x.shape[1]
        return jnp.where(real, padded, jnp.nan)

    monkeypatch.setattr(token_layout.TokenLayout, "pad_tokens", poison)
    poisoned, weights = denoiser(8, ODD, euler)
    compare("poisoned padding", step(poisoned, weights, (noise.numpy(),), euler, 0, text, ODD)[0], expected, error=1e-6)


@pytest.mark.slow
def test_other_dimensions_work_too(tmp_path, compare: Callable):
    """Nothing is tuned to the built-in checkpoint: other heads, widths, depths and text."""
    from dataclasses import replace
    from types import MappingProxyType

    changes = {
        "text_encoder": {"d_model": 56, "num_heads": 7, "d_ff": 90, "num_layers": 3},
        "transformer": {
            "num_attention_heads": 7,
            "attention_head_dim": 12,
            "ffn_dim": 130,
            "num_layers": 2,
            "text_dim": 56,
        },
        "vae_decoder": {"base_dim": 6},
    }
    components = tuple(replace(c, tiny=MappingProxyType({**c.tiny, **changes[c.name]})) for c in SPEC.components)
    folder = tmp_path / "other"
    tiny.write(replace(SPEC, components=components), folder, seed=3)
    pipe = load_pipeline(folder)
    pipe.scheduler = solver_table.scheduler_from({**SPEC.scheduler, "flow_shift": TALL.shift})
    expected = pipe(
        SHORT, NEGATIVE, height=TALL.height, width=TALL.width, num_frames=TALL.num_frames, num_inference_steps=6,
        guidance_scale=TALL.guidance_scale, generator=torch.Generator().manual_seed(TALL.seed),
    ).frames[0]  # fmt: skip
    model = ModelRef(spec_name=SPEC.name, model_id=str(folder), precision="float32")
    runner = engine(8)
    latents = runner.denoise(model, TALL, *runner.encode(model, SHORT, NEGATIVE, Silent()), Silent())
    compare("frames, other dimensions", runner.decode(model, latents, Silent()).numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"shift": 3.0},
        {"num_inference_steps": 3},
        {"seed": 11},
        {"guidance_scale": 2.0},
        {"negative_prompt": "other words"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_changes_the_result(change: dict):
    """Each widget has its effect on a second run, when everything is loaded and compiled."""
    runner = engine(8)
    negative = change.get("negative_prompt", NEGATIVE)
    settings = Settings(**{**ODD.__dict__, **{k: v for k, v in change.items() if k != "negative_prompt"}})
    first = runner.denoise(MODEL, ODD, *runner.encode(MODEL, SHORT, NEGATIVE, Silent()), Silent())["samples"]
    second = runner.denoise(MODEL, settings, *runner.encode(MODEL, SHORT, negative, Silent()), Silent())["samples"]
    assert (first - second).abs().max() > 1e-3


@pytest.mark.slow
def test_another_seed_loads_encodes_and_compiles_nothing():
    runner = engine(8)

    def generate(seed: int) -> torch.Tensor:
        settings = Settings(**{**ODD.__dict__, "seed": seed})
        embeds = runner.encode(MODEL, SHORT, NEGATIVE, Silent())
        return runner.decode(MODEL, runner.denoise(MODEL, settings, *embeds, Silent()), Silent())

    first = generate(1)
    compiled: list[str] = []

    def note(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    before = dict(runner.counts)
    second = generate(2)
    jax.monitoring.unregister_event_duration_listener(note)
    assert dict(runner.counts) == before
    assert [event for event in compiled if "compile" in event] == []
    assert (first - second).abs().max() > 1e-3


def latents_and_text(settings: Settings) -> tuple[torch.Tensor, np.ndarray]:
    shape = SPEC.geometry.latent_shape(settings)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)), oracle(ODD, SHORT).embeds


def denoiser(chips: int, settings: Settings, solver: solver_table.SolverTable) -> tuple[Program, Weights]:
    found = checkpoint.locate(SPEC, SPEC.tiny_id)
    component = SPEC.component("transformer")
    config, folder = found.config(component, Silent()), found.folder(component.folder, Silent())
    target = Target(devices=tuple(jax.devices()[:chips]), precision="float32")
    program = denoise_step.denoise_program(
        SPEC, config, target, settings, num_memory=solver.num_memory, timestep_dtype=solver.timesteps.dtype
    )
    network = modules.build(component, config)
    files = checkpoint.match(network, checkpoint.read_headers(folder, network.component), folder)
    return program, load.load(network, files, program.args[0], "transformer", Silent())


def step(
    program: Program, weights: Weights, state: tuple, solver: solver_table.SolverTable, index: int,
    text: np.ndarray, settings: Settings,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    given = {"text": text, "text_length": np.full(len(text), 512, np.int32)}
    args = (state, solver.table[index], solver.timesteps[index], given, np.float32(settings.guidance_scale))
    placed = jax.tree.map(lambda value, want: jax.device_put(value, want.sharding), args, program.args[1:])
    return tuple(np.asarray(x) for x in program.compile()(weights, *placed)[:-2])

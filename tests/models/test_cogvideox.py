"""CogVideoX 1.5 against `diffusers.CogVideoXPipeline` on the CPU in float32: every stage and the whole, on 1, 3 and 8
chips."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tests.support.patience import mostly, slower
from comfyui_tpu.tpu_runtime import api, tokenization
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("CogVideoX")
MODEL = parity.tiny_model(SPEC)
CHIPS = (1, 3, 8)
SHORT, NEGATIVE = "panda", "blurred details, overexposed"
LONG = " ".join([SPEC.texts["prompt"]] * 4)  # over 226 tokens
# Latent frames 5, 1 and 3, padded to 6, 2 and 4; tokens 3 * 5 * 7 = 105, 4 * 7 = 28, 2 * 7 * 3 = 42: the first divides
# by no number of chips but 3.
ODD = Settings(height=80, width=112, num_frames=17, num_inference_steps=3, guidance_scale=6.0, seed=7)
FLAT = Settings(height=64, width=112, num_frames=1, num_inference_steps=3, guidance_scale=1.0, seed=8)
TALL = Settings(height=112, width=48, num_frames=9, num_inference_steps=3, guidance_scale=6.0, seed=9)
# What the makers recommend. 1000 is no multiple of 3 and one of 5: the last step adds noise, or none.
DPM = {"scheduler": "CogVideoXDPMScheduler", "use_dynamic_cfg": True}
TALL_DPM = replace(TALL, **DPM)
ODD_DPM = replace(ODD, **DPM, num_inference_steps=5)
ODD_DYNAMIC = replace(ODD, use_dynamic_cfg=True)


@functools.cache
def upstream_pipeline() -> Any:
    return parity.upstream("CogVideoXPipeline", tiny.ensure_random(SPEC))


def with_scheduler(name: str) -> Any:
    """The pipeline, with another scheduler set as the makers' own script sets it."""
    import diffusers

    pipe = upstream_pipeline()
    if name == "checkpoint":
        return pipe
    scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config, timestep_spacing="trailing")
    other = diffusers.CogVideoXPipeline(**{**pipe.components, "scheduler": scheduler})
    other.set_progress_bar_config(disable=True)
    return other


@functools.cache
def oracle(settings: Settings) -> parity.Result:
    return generate(with_scheduler(settings.scheduler), settings)


def generate(pipe: Any, settings: Settings, **arguments: Any) -> parity.Result:
    """Upstream's latents without the frames that it discards, `[1, 16, frames, h, w]`."""
    found = parity.generate(
        pipe, settings, prompt=SHORT, negative_prompt=NEGATIVE, num_frames=settings.num_frames,
        use_dynamic_cfg=settings.use_dynamic_cfg, **arguments,
    )  # fmt: skip
    return replace(found, latents=found.latents.swapaxes(1, 2)[:, :, -((settings.num_frames - 1) // 4 + 1) :])


@functools.cache
def embeddings(prompt: str) -> np.ndarray:
    """Upstream's, of the prompt and of the negative one, `[2, 226, dim]`."""
    with torch.no_grad():
        return torch.cat(upstream_pipeline().encode_prompt(prompt, NEGATIVE)).numpy()


def normalised(latents: dict[str, Any]) -> np.ndarray:
    return (latents["samples"] * upstream_pipeline().vae.config.scaling_factor).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "prompt"), mostly([(1, SHORT), (3, LONG), (8, LONG)], (1, SHORT), (8, LONG)))
def test_cogvideox_prompt_embeddings_match_diffusers(chips: int, prompt: str, compare: Callable):
    prompt_embeds, negative = parity.encode_anew(chips, MODEL, prompt, NEGATIVE)
    ours = np.concatenate([prompt_embeds[0][0].numpy(), negative[0][0].numpy()])
    compare(f"embeddings, {chips} chips", ours, embeddings(prompt), error=NETWORK)
    assert prompt_embeds[0][1]["length"] == {SHORT: 2, LONG: 226}[prompt]


def test_cogvideox_empty_negative_prompt_matches_diffusers(compare: Callable):
    negative = engine(1).encode(MODEL, SHORT, "", SilentProgress())[1]
    expected = upstream_pipeline().encode_prompt(SHORT)[1].detach()
    compare("empty prompt", negative[0][0].numpy(), expected.numpy(), error=NETWORK)


def test_load_tokenizer_sentencepiece_only_folder_matches_sentencepiece(tmp_path: Path):
    """It has no tokenizer.json, only the SentencePiece model."""
    import sentencepiece

    (tmp_path / "text").write_text(f"{SPEC.texts['prompt']}\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "spiece"), vocab_size=90, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, "legacy": True, "model_max_length": 226}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids, mask = SPEC.text_encoders[0].tokenize(tokenization.load_tokenizer(tmp_path), ["A panda,  two  hats", ""])
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "spiece.model")).encode("A panda,  two  hats")
    assert ids[0].tolist() == [*pieces, 1, *[0] * (225 - len(pieces))]
    assert ids[1].tolist() == [1, *[0] * 225]
    assert mask.sum(axis=1).tolist() == [len(pieces) + 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("chips", CHIPS)
def test_cogvideox_denoise_with_poisoned_padding_matches_diffusers(
    chips: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """105 tokens: those that 4 chips need beside them are NaN."""
    parity.poison_padding(monkeypatch)
    noise = parity.random_latents(SPEC, ODD)
    pipe = upstream_pipeline()
    rope = pipe._prepare_rotary_positional_embeddings(ODD.height, ODD.width, noise.shape[2], "cpu")
    with torch.no_grad():
        cond, uncond = (
            pipe.transformer(
                noise.transpose(1, 2), torch.from_numpy(row[None]), torch.tensor([700]), image_rotary_emb=rope
            ).sample.transpose(1, 2)
            for row in embeddings(SHORT)
        )
    expected = uncond + ODD.guidance_scale * (cond - uncond)
    compare(f"denoiser, {chips} chips", denoise_once(noise, chips), expected.numpy(), error=NETWORK)


@pytest.mark.parametrize(
    ("chips", "settings"),
    [
        pytest.param(3, TALL, id="3 tall"),
        *(
            pytest.param(chips, settings, id=name, marks=mark)
            for name, chips, settings, mark in (
                ("1 odd", 1, ODD, pytest.mark.recorded),
                ("8 odd", 8, ODD, pytest.mark.recorded),
                ("8 flat", 8, FLAT, pytest.mark.recorded),
                # Eight chips run each part: the encoder, a call of the denoiser, and the decoder.
                ("8 odd DPM", 8, ODD_DPM, pytest.mark.recorded),
                ("3 tall DPM", 3, TALL_DPM, pytest.mark.slow),
                ("8 odd dynamic", 8, ODD_DYNAMIC, pytest.mark.recorded),
            )
        ),
    ],
)
def test_cogvideox_latents_and_frames_match_diffusers(chips: int, settings: Settings, compare: Callable):
    runner, expected = engine(chips), oracle(settings)
    latents = runner.denoise(
        MODEL, settings, *runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress()), SilentProgress()
    )
    compare(f"latents, {chips} chips", normalised(latents), expected.latents)
    frames = runner.decode(MODEL, latents, SilentProgress())
    assert frames.shape == (settings.num_frames, settings.height, settings.width, 3)
    compare(f"frames, {chips} chips", frames.numpy(), expected.frames)


def test_build_table_uses_scheduler_of_the_checkpoint():
    config = {**SPEC.recipe.scheduler, "_class_name": "CogVideoXDPMScheduler"}
    shape = SPEC.geometry.latent_shape(ODD)
    own = solver_table.build_table(SPEC, config, ODD, shape)
    chosen = solver_table.build_table(
        SPEC, SPEC.recipe.scheduler, replace(ODD, scheduler="CogVideoXDPMScheduler"), shape
    )
    plain = solver_table.build_table(SPEC, config, replace(ODD, scheduler="CogVideoXDDIMScheduler"), shape)
    published = solver_table.build_table(SPEC, SPEC.recipe.scheduler, ODD, shape)
    assert np.array_equal(own.table, chosen.table) and own.draws == chosen.draws != ()
    assert np.array_equal(plain.table, published.table) and plain.draws == ()


@pytest.mark.slow
def test_dynamic_guidance_reuses_the_compiled_program():
    """It is an argument of the one program: 1 at the least, and one more than guidance_scale at the most."""
    tall_latents(TALL, NEGATIVE)
    before, dynamic = engine(3).counts["compile"], replace(TALL, use_dynamic_cfg=True, guidance_scale=3.0)
    tall_latents(dynamic, NEGATIVE)
    assert engine(3).counts["compile"] == before
    scales = [SPEC.recipe.guidance_at(3.0, timestep, dynamic.num_inference_steps) for timestep in range(1000)]
    assert 1 <= min(scales) < 1.1 and 3.9 < max(scales) <= 4


@pytest.mark.slow
def test_cogvideox_decode_even_latent_frames_matches_diffusers(compare: Callable):
    """A LATENT may come from elsewhere: even numbers start with two frames and four images each."""
    latents = torch.randn(1, 16, 4, 10, 14, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = upstream_pipeline().vae.decode(latents).sample[0].permute(1, 2, 3, 0) / 2 + 0.5
    ours = engine(8).decode(MODEL, {"samples": latents}, SilentProgress())
    compare("4 latent frames", ours.numpy(), expected.clamp(0, 1).numpy())


@pytest.mark.recorded
def test_cogvideox_bfloat16_error_stays_within_bound(compare: Callable):
    """Against the float32 oracle: rounding of 8 bits through 3 + 3 blocks, 3 steps and the VAE."""
    runner, expected = engine(8), oracle(FLAT)
    model = replace(MODEL, precision="bfloat16")
    embeds = runner.encode(model, SHORT, NEGATIVE, SilentProgress())
    latents = runner.denoise(model, FLAT, *embeds, SilentProgress())
    frames = runner.decode(model, latents, SilentProgress())
    compare("embeddings, bfloat16", embeds[0][0][0].numpy(), embeddings(SHORT)[:1], error=4e-2, slope=3e-3)
    compare("latents, bfloat16", normalised(latents), expected.latents, error=1.5e-2, slope=3e-3)
    compare("frames, bfloat16", frames.numpy(), expected.frames, error=1.5e-1, overall=2e-2, slope=3e-3)


@pytest.mark.recorded
def test_cogvideox_other_dimensions_match_diffusers(tmp_path: Path, compare: Callable):
    """Nothing is tuned to the built-in checkpoint: other heads, widths, depths, text and latent scale."""
    changes = {
        "text_encoder": {"d_model": 56, "num_heads": 7, "d_ff": 90, "num_layers": 2},
        "transformer": {"num_attention_heads": 5, "attention_head_dim": 32, "num_layers": 2, "text_embed_dim": 56},
        "vae_decoder": {"block_out_channels": (4, 8, 8, 12), "norm_num_groups": 2, "scaling_factor": 1.15},
    }
    model, runner = parity.write_other_dimensions(SPEC, tmp_path / "other", changes), engine(8)
    expected = generate(parity.upstream("CogVideoXPipeline", tmp_path / "other"), TALL)
    latents = runner.denoise(model, TALL, *runner.encode(model, SHORT, NEGATIVE, SilentProgress()), SilentProgress())
    compare("frames, other dimensions", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


CHANGES: tuple[dict[str, Any], ...] = (
    {"num_inference_steps": 2},
    {"seed": 11},
    {"guidance_scale": 2.0},
    {"negative_prompt": "other words"},
    {"scheduler": "CogVideoXDPMScheduler"},
    {"use_dynamic_cfg": True},
)


# Upstream's latents by the other scheduler, above, are not those of the checkpoint's.
@pytest.mark.slow
@pytest.mark.parametrize("change", slower(CHANGES, *CHANGES[:5]), ids=lambda change: next(iter(change)))
def test_cogvideox_every_setting_changes_the_latents(change: dict):
    """Each widget has its effect on a second run, when everything is loaded and compiled."""
    settings = replace(TALL, **{name: value for name, value in change.items() if name != "negative_prompt"})
    first = tall_latents(TALL, NEGATIVE)
    assert difference(first, tall_latents(settings, change.get("negative_prompt", NEGATIVE))) > 1e-3


@functools.cache
def tall_latents(settings: Settings, negative: str) -> torch.Tensor:
    runner = engine(3)
    embeds = runner.encode(MODEL, SHORT, negative, SilentProgress())
    return runner.denoise(MODEL, settings, *embeds, SilentProgress())["samples"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"height": 88},
            refused_input(
                "height",
                "settings.breaks_rule",
                title=SPEC.title,
                value=88,
                rule=Expected(
                    "settings.multiple", multiple_of=16, rule=Expected("settings.between", low=64, high=1920)
                ),
                nearest=[80, 96],
            ),
        ),
        (
            {"num_frames": 13},
            refused_input(
                "num_frames",
                "settings.breaks_rule",
                title=SPEC.title,
                value=13,
                rule=Expected(
                    "settings.grid", multiple_of=8, plus=1, rule=Expected("settings.between", low=1, high=161)
                ),
                nearest=[9, 17],
            ),
        ),
        (
            {"guidance_scale": 0.5},
            refused_input(
                "guidance_scale", "settings.outside", title=SPEC.title, value=0.5, low=1.0, high=20.0, near=1.0
            ),
        ),
        (
            {"scheduler": "DDIM"},
            refused_input(
                "scheduler",
                "settings.not_an_option",
                title=SPEC.title,
                value="'DDIM'",
                others="",
                options="checkpoint, CogVideoXDDIMScheduler, CogVideoXDPMScheduler",
            ),
        ),
    ],
)
def test_cogvideox_invalid_setting_raises_value_error(change: dict, expected: Expected):
    with raises_message(ValueError, expected):
        SPEC.settings(**change)


def test_cogvideox_unpublished_size_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(api, "get_engine", lambda progress: SimpleNamespace(run=lambda *args, **given: {}))
    model = ModelRef(spec_name=SPEC.name, model_id=SPEC.published.hub_id)

    def warnings(**widgets: int) -> list[str]:
        caplog.clear()
        api.denoise(model, SPEC.settings(**widgets), [], None, progress=SilentProgress())
        return [record.getMessage() for record in caplog.records]

    shown = SPEC.settings()
    assert (shown.height, shown.width, shown.num_frames) == (768, 1360, 81)
    assert warnings() == warnings(num_frames=161) == warnings(num_frames=17) == []
    sentence = (
        "CogVideoX 1.5 5B: {} frames runs, but may look worse than the published sizes: 1360x768, and 16k + 1 "
        "frames up to 161."
    )
    assert warnings(height=720, width=1280) == [sentence.format("1280x720 with 81")]
    assert warnings(height=720, width=1280) == []
    assert warnings(num_frames=89) == [sentence.format("1360x768 with 89")]
    model = MODEL
    assert warnings(**SPEC.miniature.inputs) == []


def denoise_once(noise: torch.Tensor, chips: int) -> np.ndarray:
    given = {"text": embeddings(SHORT), "text_length": np.full(2, 226, np.int32)}
    return parity.denoise_once(SPEC, ODD, noise, given, timestep=700, chips=chips)

"""The stages of a generation, each a function of a `Stage`, and warming up: what an engine runs, by name, is `WORK`."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import media, tokens, versions
from ..cache.store import signature
from ..checkpoints import read_ahead as reading
from ..model_spec import STAGES, Settings, TextEncoding
from ..programs import generation, network_call
from ..programs.executables import Executable
from . import conditioning
from . import denoise as denoising
from .payloads import Conditioning, ImageCondition, Latent
from .program_cache import Compilation, Wanted
from .stage import Stage

log = logging.getLogger(__name__)

PROMPTS = ("prompt", "negative prompt")


def encode(stage: Stage, prompt: str, negative_prompt: str) -> tuple[Conditioning, Conditioning | None]:
    """Prompt and negative prompt as CONDITIONING, from the cache where the same text was encoded before."""
    spec = stage.spec
    prompts = (prompt, negative_prompt) if spec.recipe.guidance == "cfg" else (prompt,)
    folders = [(spec.component(text.component).folder, text.tokenizer_folder) for text in spec.text_encoders]
    parts = [tuple(stage.found.identity(folder, stage.progress) for folder in pair) for pair in folders]
    sources = (*versions.environment(), versions.source_digest())
    key = signature(spec.name, parts, stage.target.precision, prompts, sources)
    found = stage.prompt_cache.get(key, spec.family, lambda: _encode(stage, prompts), stage.hosts.decide)
    if lost := [sentence for named in zip(PROMPTS, prompts, found, strict=False) for sentence in _lost(stage, *named)]:
        log.warning("%s", " ".join(lost))
        stage.progress.text(" ".join(lost))
    return found


def _lost(stage: Stage, name: str, prompt: str, encoded: Conditioning | None) -> Iterator[str]:
    """What of a prompt does not reach the model as it may be meant, in sentences for the user."""
    title = stage.spec.title
    if literals := ", ".join(tokens.literals(prompt)):
        yield f"{title}: {literals} in the {name} is read as it stands and means nothing more here. Say it in words."
    for text in stage.spec.text_encoders if encoded else ():
        assert encoded
        # Only what fills all places may have been longer.
        if encoded[0][1].get(f"{text.name}_length", text.max_length) < text.max_length:
            continue
        tokenizer = tokens.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
        number, words = tokens.cut_off(text, tokenizer, prompt)
        if number:
            encoder = text.component.replace("_", " ")
            start = f", from {tokens.shown(words)} on" if words else ""
            yield (
                f"{title}: the {name} has {text.max_length + number} tokens, and the {encoder} takes "
                f"{text.max_length}: the last {number} are cut off{start}. Shorten it."
            )


def _encode(stage: Stage, prompts: Sequence[str]) -> tuple[Conditioning, Conditioning | None]:
    encoded = [_encode_text(stage, text, prompts) for text in stage.spec.text_encoders]
    rows = [conditioning.conditioning(stage.spec, encoded, row) for row in range(len(prompts))]
    stage.counts["encode"] += 1
    return rows[0], rows[1] if len(rows) > 1 else None


def _encode_text(stage: Stage, text: TextEncoding, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """States `[rows, max_length, dim]` and lengths `[rows]` of one text encoder."""
    tokenizer = tokens.load_tokenizer(stage.found.folder(text.tokenizer_folder, stage.progress))
    ids, mask = text.tokenize(tokenizer, prompts)
    stage.progress.text("Encoding the prompt")
    states, _ = stage.call(text.component, text.encode, ids, mask)
    return states, mask.sum(axis=1).astype(np.int32)


def encode_image(stage: Stage, image: torch.Tensor, settings: Settings) -> ImageCondition:
    """An IMAGE `[N, height, width, 3]` in 0..1, CPU float32, as the denoiser's condition."""
    seen = media.pictures(image)
    conditioning.check_pictures(stage.spec, settings, len(seen))
    assert stage.spec.pictures.encode is not None
    stage.progress.text("Encoding the image")
    tensors = stage.spec.pictures.encode(stage.call, seen, settings, stage.config(stage.spec.vae.component))
    return conditioning.condition(stage.spec, settings, tensors)


def denoise(
    stage: Stage,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    condition: ImageCondition | None = None,
    latents: Mapping[str, Any] | None = None,
) -> Latent:
    """From noise, or from latents, to a LATENT."""
    plan = denoising.plan_of(stage, settings)
    inputs = conditioning.denoiser_inputs(plan, prompt_embeds, negative_prompt_embeds, condition)
    standing = denoising.begin(plan, inputs, latents, stage.progress.text)
    return denoising.end(plan, *denoising.denoise(stage, plan, standing))


def decode(stage: Stage, latents: Mapping[str, Any]) -> torch.Tensor:
    """The samples `[batch, channels, ...]` of a LATENT to IMAGE frames of all of them."""
    samples = conditioning.latent_samples(stage.spec, latents)
    stage.progress.text("Decoding")
    frames = []
    for sample in samples:
        for chunk in stage.spec.vae.decode(stage.call, sample[None], stage.report("chunk")):
            if stage.hosts.is_leader:
                frames.append(torch.from_numpy(np.array(chunk)))
    return torch.cat(frames) if frames else torch.empty(0)


def warm(stage: Stage, settings: Settings) -> int:
    """Compiles every program of a generation of this size, loading no weights; how many were not compiled yet."""
    before = stage.counts["compile"]
    _each_program(stage, settings, STAGES, lambda wanted: stage.program_cache.get(wanted, stage.progress))
    return stage.counts["compile"] - before


_STAGES = (encode, encode_image, denoise, decode)
WORK: Mapping[str, Callable[..., Any]] = {**dict(zip(STAGES, _STAGES, strict=True)), "warmup": warm}


def note(stage: Stage, settings: Settings, stages: Sequence[str]) -> None:
    """Lets the programs of later stages (some of `model_spec.STAGES`) be compiled behind the one that runs."""

    def note_one(wanted: Wanted) -> Compilation | Executable:
        stage.progress.check_cancelled()
        return stage.program_cache.note(wanted)

    # Its program depends on some of the weights, and a download belongs to the stage, which shows it.
    is_here = all(stage.found.weights_here(stage.spec.component(name)) for name in stage.spec.denoiser.experts)
    _each_program(stage, settings, [name for name in stages if is_here or name != "denoise"], note_one)


def read_ahead(stage: Stage, stages: Sequence[str]) -> None:
    """Lets the weights of the denoiser and the decoder be in the kernel's page cache when these stages load them."""
    names = [
        *(stage.spec.denoiser.experts if "denoise" in stages else ()),
        *((stage.spec.vae.component,) if "decode" in stages else ()),
    ]
    loaded = [(one.component, one.model) for one in stage.device_cache.list()]
    files = [
        stage.found.weights_here(stage.spec.component(name))
        for name in names
        if (name, stage.found.model_id) not in loaded
    ]
    reading.read_ahead(itertools.chain.from_iterable(files), stage.progress.check_cancelled)


def _each_program(
    stage: Stage, settings: Settings, stages: Sequence[str], prepare: Callable[[Wanted], Compilation | Executable]
) -> None:
    """Passes every program of these stages to `prepare`, in the order in which they run; loads no weights."""
    plan = denoising.plan_of(stage, settings)
    call = network_call.caller(lambda request: prepare(stage.wanted(request)).program, generation.zeros)
    for name in STAGES:
        if name in stages and name != "denoise":
            generation.rehearse(plan, call, (name,))
        elif name in stages:
            for wanted in itertools.chain.from_iterable(denoising.programs_wanted(stage, plan, {}).values()):
                prepare(wanted)

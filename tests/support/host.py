"""A host whose user may cancel, and an engine whose stages are methods with the arguments that tests give them."""

import uuid
from collections.abc import Mapping
from typing import Any

import jax
import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine.engine import Engine
from comfyui_tpu.tpu_runtime.engine.stage_values import Conditioning, ImageCondition, Latent
from comfyui_tpu.tpu_runtime.machine import device_access
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.progress import Progress, SilentProgress


class Cancelled(Exception):
    pass


def new_prompt() -> str:
    """One that nobody has encoded. What others encoded is in the cache, and another process may round otherwise."""
    return f"a cat {uuid.uuid4().hex[:8]}"


def use_two_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find two chips; eight take longer, and each computes a text's states."""
    monkeypatch.setattr(device_access, "open_devices", lambda *_: jax.devices()[:2])


class Host(SilentProgress):
    """`said` is what it was told; once `is_cancelled`, whoever asks it ends with `Cancelled`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_cancelled = False

    def text(self, message: str) -> None:
        self.said.append(message)

    def check_cancelled(self) -> None:
        if self.is_cancelled:
            raise Cancelled


class Runner(Engine):
    """The engine, with one method for each stage."""

    def encode(
        self, model: ModelRef, prompt: str, negative_prompt: str, progress: Progress
    ) -> tuple[Conditioning, Conditioning | None]:
        return self.run("encode", model, progress, prompt=prompt, negative_prompt=negative_prompt)

    def encode_image(
        self, model: ModelRef, image: torch.Tensor, settings: Settings, progress: Progress
    ) -> ImageCondition:
        return self.run("image", model, progress, image=image, settings=settings)

    def denoise(
        self,
        model: ModelRef,
        settings: Settings,
        prompt_embeds: Conditioning,
        negative_prompt_embeds: Conditioning | None,
        progress: Progress,
        condition: ImageCondition | None = None,
        latents: Mapping[str, Any] | None = None,
    ) -> Latent:
        return self.run(
            "denoise", model, progress, settings=settings, prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds, condition=condition, latents=latents,
        )  # fmt: skip

    def decode(self, model: ModelRef, latents: Latent, progress: Progress) -> torch.Tensor:
        return self.run("decode", model, progress, latents=latents)

    def warmup(self, model: ModelRef, settings: Settings, progress: Progress) -> int:
        return self.run("warmup", model, progress, settings=settings)

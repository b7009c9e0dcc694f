"""The process's one engine: its devices, the weights on them, the compiled programs, and the stages that use them."""

import contextlib
import functools
import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import torch

from . import cached_steps, checkpoint, guider, inputs, load, modules, programs, schedule, step_cache
from . import precision as precisions
from .checkpoint import Checkpoint
from .program import Program, signature, use_persistent_cache
from .progress import Progress
from .residency import Residency
from .spec import Component, ModelSpec, Settings, TextEncoding
from .stages import Condition, Conditioning, ModelRef
from .telemetry import compilations

log = logging.getLogger(__name__)

# Encoded prompts kept in host memory: one is at most 512 x 15360 float32 numbers.
MAX_PROMPTS = 16


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled program and the arguments' shapes and shardings."""

    program: Program
    compiled: jax.stages.Compiled

    def __call__(self, weights: load.Weights, *args: Any) -> Any:
        """Runs it; host arrays among `args` are placed as the program wants them."""
        placed = jax.tree.map(lambda value, want: jax.device_put(value, want.sharding), args, self.program.args[1:])
        return self.compiled(weights, *placed)


@functools.cache
def engine() -> "Engine":
    """The engine, made on first use: only then a device is touched."""
    return Engine()


class Engine:
    """Runs one stage at a time. `counts` tells how often weights were loaded, prompts encoded, programs compiled."""

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        use_persistent_cache()
        self.compilations = compilations()
        self.devices = tuple(devices or jax.devices())
        self.counts: Counter[str] = Counter()
        self.residency = Residency(self.devices[0])
        self._executables: dict[str, Executable] = {}
        self._prompts: OrderedDict[str, tuple[Conditioning, Conditioning | None]] = OrderedDict()
        self._lock = threading.RLock()

    # -- stages ------------------------------------------------------------------------------------------------------

    def encode(
        self, model: ModelRef, prompt: str, negative_prompt: str, progress: Progress
    ) -> tuple[Conditioning, Conditioning | None]:
        """See `stages.encode_prompt`."""
        spec = model.spec
        prompts = (prompt, negative_prompt) if spec.guidance == "cfg" else (prompt,)
        with self._session(model, progress) as run:
            key = signature(spec.name, run.identity(spec.texts_encoded[0].component), run.target.precision, prompts)
            if key not in self._prompts:
                encoded = [run.encode_text(text, prompts) for text in spec.texts_encoded]
                rows = [inputs.conditioning(spec, encoded, row) for row in range(len(prompts))]
                self._prompts[key] = (rows[0], rows[1] if len(rows) > 1 else None)
                self.counts["encode"] += 1
                if len(self._prompts) > MAX_PROMPTS:
                    self._prompts.popitem(last=False)
            self._prompts.move_to_end(key)
            return self._prompts[key]

    def encode_image(self, model: ModelRef, image: torch.Tensor, settings: Settings, progress: Progress) -> Condition:
        """See `stages.encode_image`."""
        spec = model.spec
        if spec.encode_image is None:
            raise ValueError(f"{spec.title} does not take an image.")
        with self._session(model, progress) as run:
            progress.text("Encoding the image")
            config = run.found.config(spec.component(spec.vae), progress)
            tensors = spec.encode_image(run.call, image.to(torch.float32).cpu(), settings, config)
            return inputs.condition(spec, settings, tensors)

    def denoise(
        self,
        model: ModelRef,
        settings: Settings,
        prompt_embeds: Conditioning,
        negative_prompt_embeds: Conditioning | None,
        progress: Progress,
        condition: Condition | None = None,
    ) -> dict[str, Any]:
        """See `stages.denoise`."""
        spec = model.spec
        with self._session(model, progress) as run:
            settings = guider.settings_for(run.found, settings, progress)
            config = run.found.config(spec.component(spec.experts[0]), progress)
            given = inputs.denoiser_inputs(spec, config, settings, prompt_embeds, negative_prompt_embeds, condition)
            vae_config = run.found.config(spec.component(spec.vae), progress)
            sample = run.solve(settings, config, given)
            return {"samples": spec.finish(sample, settings, vae_config)}

    def decode(self, model: ModelRef, latents: dict[str, Any], progress: Progress) -> torch.Tensor:
        """See `stages.decode`."""
        spec = model.spec
        samples = inputs.latent_samples(spec, latents)
        with self._session(model, progress) as run:
            progress.text("Decoding")
            frames = []
            for sample in samples:
                for chunk in spec.decode(run.call, sample[None], run.report("chunk")):
                    frames.append(torch.from_numpy(np.array(chunk)))
            return torch.cat(frames)

    def free(self) -> None:
        """Drops weights and compiled programs."""
        with self._lock:
            self.residency.clear()
            self._executables.clear()

    def forget_prompts(self) -> None:
        """Drops the encoded prompts kept in host memory."""
        with self._lock:
            self._prompts.clear()

    @contextlib.contextmanager
    def _session(self, model: ModelRef, progress: Progress) -> Iterator["Run"]:
        """One stage at a time, without gradients; ComfyUI calls nodes in inference mode, which torchax cannot use."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            precision = precisions.resolve(model.precision, self.devices[0].platform)
            target = programs.Target(devices=self.devices, precision=precision)
            yield Run(engine=self, found=model.locate(), target=target, progress=progress)

    # -- what stages need --------------------------------------------------------------------------------------------

    def executable(
        self, title: str, key: tuple[Any, ...], progress: Progress, build: Callable[[], Program]
    ) -> Executable:
        """The program for `key`, compiled if this process has not compiled it yet."""
        digest = signature(*(json.dumps(part, sort_keys=True) if isinstance(part, dict) else part for part in key))
        if digest not in self._executables:
            progress.text(f"Preparing the program of {title} (compiled once, then cached)")
            progress.check_cancelled()
            program = build()
            self._executables[digest] = Executable(program=program, compiled=program.compile())
            self.counts["compile"] += 1
            progress.check_cancelled()
        return self._executables[digest]

    def weights(self, found: Checkpoint, component: Component, program: Program, progress: Progress) -> load.Weights:
        """A component's weights as `program` wants them, loaded if they are not resident."""
        wanted = program.args[0]
        folder = found.folder(component.folder, progress)
        title = f"{component.name} of {found.model_id}"

        def read() -> load.Weights:
            self.counts["load"] += 1
            network = modules.build(component, found.config(component, progress))
            files = checkpoint.match(network, checkpoint.read_headers(folder), folder)
            return load.load(network, files, wanted, title, progress)

        key = (component.name, str(folder), program.precision)
        return self.residency.get(key, title, load.bytes_per_chip(wanted), read).weights


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage at work: an engine, the checkpoint, the target and the host that watches."""

    engine: Engine
    found: Checkpoint
    target: programs.Target
    progress: Progress

    @property
    def spec(self) -> ModelSpec:
        return self.found.spec

    def identity(self, component: str) -> str:
        """What tells one checkpoint's component from another's."""
        return str(self.found.folder(self.spec.component(component).folder, self.progress))

    def report(self, unit: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self.progress.step(done, total, unit)
            self.progress.check_cancelled()

        return report

    def call(
        self,
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        place: programs.Place = "whole",
        carries: bool = False,
    ) -> tuple[Any, Any]:
        """Runs a network; see `spec.Call`."""
        part = self.spec.component(component)
        config = self.found.config(part, self.progress)
        args = jax.tree.map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, args)
        run = self.engine.executable(
            f"the {component.replace('_', ' ')}",
            (self.spec.name, config, self.target, *programs.call_key(component, function, args, place)),
            self.progress,
            lambda: programs.call_program(
                self.spec, component, config, self.target, function, programs.abstract_args(args),
                place=place, carries=carries,
            ),
        )  # fmt: skip
        weights = self.engine.weights(self.found, part, run.program, self.progress)
        self.progress.check_cancelled()
        result, carried = run(weights, *args)
        return jax.tree.map(np.asarray, result), carried

    def encode_text(self, text: TextEncoding, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """States `[rows, max_length, dim]` and lengths `[rows]` of one text encoder."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.found.folder(text.tokenizer_folder, self.progress))
        ids, mask = text.tokenize(tokenizer, prompts)
        self.progress.text("Encoding the prompt")
        states, _ = self.call(text.component, text.encode, ids, mask)
        return states, mask.sum(axis=1).astype(np.int32)

    def solve(self, settings: Settings, config: dict[str, Any], given: dict[str, np.ndarray]) -> torch.Tensor:
        """All denoising steps. Waits for each, so that progress is true and a cancel stops within one step."""
        spec, progress = self.spec, self.progress
        solver = self._solver(settings)
        run = self._denoiser(settings, config, solver, given)
        noise = spec.noise(spec, settings, torch.Generator().manual_seed(settings.seed)).numpy()
        state = schedule.initial_state(noise, solver.num_memory)
        on_device = jax.tree.map(lambda x, want: jax.device_put(x, want.sharding), given, run.program.args[4])
        experts = self._experts(solver, settings)
        self.engine.weights(self.found, spec.component(experts[0][0]), run.program, progress)
        progress.text(f"Denoising, {solver.num_steps} steps")
        progress.step(0, solver.num_steps, "step")
        for index, (expert, scale) in enumerate(experts):
            progress.check_cancelled()
            weights = self.engine.weights(self.found, spec.component(expert), run.program, progress)
            row, timestep = solver.table[index], solver.timesteps[index]
            state = run(weights, state, row, timestep, on_device, np.float32(scale))
            jax.block_until_ready(state)
            progress.step(index + 1, solver.num_steps, "step")
        sample = torch.from_numpy(np.array(state[0]))
        if not torch.isfinite(sample).all():
            raise ValueError("the latents became NaN or infinite while denoising. Try precision float32.")
        return sample

    def _solver(self, settings: Settings) -> schedule.Schedule:
        spec = self.spec
        config = checkpoint.read_json(self.found.folder("scheduler", self.progress) / "scheduler_config.json")
        if settings.shift and spec.shift_key:  # 0 is the checkpoint's own
            config[spec.shift_key] = settings.shift
        arguments = spec.solver_arguments(config, spec.geometry.latent_shape(settings), settings)
        return schedule.probe(schedule.scheduler_from(config), settings.num_inference_steps, **arguments)

    def _denoiser(
        self, settings: Settings, config: dict[str, Any], solver: schedule.Schedule, given: dict[str, np.ndarray]
    ) -> Executable | cached_steps.CachedDenoiser:
        """What is called for each step. With a step cache it is two programs, both compiled before the first step."""
        experts = [expert for expert, _ in self._experts(solver, settings)]
        is_full = step_cache.full_steps(settings.step_cache, experts)
        compiled = functools.partial(self._step, settings, config, solver, given)
        if self.spec.step_reuse is None or all(is_full):
            return compiled()
        full = compiled("keep")
        cached = compiled(cached_steps.kept_shapes(self.spec.step_reuse, full.program))
        return cached_steps.CachedDenoiser(full=full, cached=cached, is_full=is_full)

    def _step(
        self,
        settings: Settings,
        config: dict[str, Any],
        solver: schedule.Schedule,
        given: dict[str, np.ndarray],
        features: Literal["keep"] | cached_steps.Shapes | None = None,
    ) -> Executable:
        spec = self.spec
        shape = spec.geometry.latent_shape(settings)
        references = {name: x.shape for name, x in given.items() if spec.references and name.startswith("reference_")}
        kind = features if features in (None, "keep") else "reuse"
        return self.engine.executable(
            f"the denoiser for {settings.width}x{settings.height}, {settings.num_frames} frames",
            ("denoise", spec.name, config, self.target, shape, spec.branches(settings), solver.num_memory,
             solver.timesteps.dtype, kind, *references.items()),
            self.progress,
            lambda: programs.denoise_program(
                spec, config, self.target, settings, num_memory=solver.num_memory,
                timestep_dtype=solver.timesteps.dtype, references=references, features=features,
            ),
        )  # fmt: skip

    def _experts(self, solver: schedule.Schedule, settings: Settings) -> list[tuple[str, float]]:
        """Which denoiser runs at each step, and its guidance: the first above the checkpoint's boundary, then another.

        As upstream: the boundary is a share of the scheduler's training timesteps.
        """
        first, scale = self.spec.experts[0], settings.guidance_scale
        if len(self.spec.experts) == 1:
            return [(first, scale)] * solver.num_steps
        scheduler = checkpoint.read_json(self.found.folder("scheduler", self.progress) / "scheduler_config.json")
        boundary = self.found.index(self.progress)["boundary_ratio"] * scheduler.get("num_train_timesteps", 1000)
        second_scale = scale if settings.guidance_scale_2 is None else settings.guidance_scale_2
        second = (self.spec.experts[1], second_scale)
        return [(first, scale) if timestep >= boundary else second for timestep in solver.timesteps]

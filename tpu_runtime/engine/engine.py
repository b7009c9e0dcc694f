"""The process's one engine: its devices, the weights on them, the compiled programs, and the stages that use them."""

import contextlib
import functools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import numpy as np
import torch

from ...cli import versions
from .. import media, refusal, step_cache, tokens
from .. import precision as precisions
from ..cache.store import signature
from ..checkpoints import checkpoint, guider, load, score_bound
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_ref import ModelRef
from ..files import read_json
from ..programs import (
    denoise_step,
    executables,
    finite,
    modules,
    network_call,
    rehearsal,
    solver_table,
    step_reuse,
    weights,
    xla_cache,
)
from ..programs.executables import Executable
from ..programs.network_call import Partition
from ..programs.program import Program, Target
from ..programs.weights import Weights
from ..programs.xla_cache import use_persistent_cache
from ..progress import Preview, Progress
from ..spec import Component, ModelSpec, Settings, TextEncoding
from . import conditioning, devices, memory_advice, telemetry
from .payloads import Conditioning, ImageCondition
from .prompt_cache import PromptCache
from .weight_cache import OutOfMemory, WeightCache

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# The stages of one generation.
GENERATION = ("encode", "encode_image", "denoise", "decode")
_engine: "Engine | None" = None
_engine_lock = threading.Lock()


def engine() -> "Engine":
    """The engine, made on first use: only then a device is touched."""
    global _engine
    with _engine_lock:
        if _engine is None:
            _engine = Engine()
        return _engine


def current() -> "Engine | None":
    """The engine, if a run has made it."""
    return _engine


class Engine:
    """Runs one stage at a time. `counts` tells how often weights were loaded, prompts encoded, programs compiled."""

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        versions.warn_once()
        use_persistent_cache()
        self.compilations = xla_cache.compilations()
        self.devices = tuple(devices or jax.devices())
        self.counts: Counter[str] = Counter(load=0, encode=0, compile=0)
        self.weight_cache = WeightCache(self.devices[0])
        self.activity: telemetry.Activity | None = None
        self.last_run: telemetry.LastRun | None = None
        self.peak_bytes = [0] * len(self.devices)
        self._run: telemetry.LastRun | None = None
        self._prompts = PromptCache()
        self._lock = threading.RLock()

    # -- stages ------------------------------------------------------------------------------------------------------

    def encode(
        self, model: ModelRef, prompt: str, negative_prompt: str, progress: Progress
    ) -> tuple[Conditioning, Conditioning | None]:
        """See `stages.encode_prompt`."""
        spec = model.spec
        prompts = (prompt, negative_prompt) if spec.guidance == "cfg" else (prompt,)

        def work(run: Run) -> tuple[Conditioning, Conditioning | None]:
            def encode() -> tuple[Conditioning, Conditioning | None]:
                encoded = [run.encode_text(text, prompts) for text in spec.text_encoders]
                rows = [conditioning.conditioning(spec, encoded, row) for row in range(len(prompts))]
                self.counts["encode"] += 1
                return rows[0], rows[1] if len(rows) > 1 else None

            folders = [(text.component, text.tokenizer_folder) for text in spec.text_encoders]
            identity = functools.partial(run.found.identity, progress=run.progress)
            parts = [(identity(spec.component(name).folder), identity(folder)) for name, folder in folders]
            key = signature(spec.name, parts, run.target.precision, prompts, executables.environment())
            return self._prompts.get(key, spec.family, encode)

        return self._stage("encode", model, progress, work)

    def encode_image(
        self, model: ModelRef, image: torch.Tensor, settings: Settings, progress: Progress
    ) -> ImageCondition:
        """See `stages.encode_image`."""
        spec = model.spec
        if spec.encode_image is None:
            raise ValueError(f"{spec.title} does not take an image.")
        seen = media.pictures(image)

        def work(run: Run) -> ImageCondition:
            run.progress.text("Encoding the image")
            config = run.found.config(spec.component(spec.vae), run.progress)
            tensors = spec.encode_image(run.call, seen, settings, config)
            return conditioning.condition(spec, settings, tensors)

        return self._stage("encode_image", model, progress, work, settings)

    def denoise(
        self,
        model: ModelRef,
        settings: Settings,
        prompt_embeds: Conditioning,
        negative_prompt_embeds: Conditioning | None,
        progress: Progress,
        condition: ImageCondition | None = None,
    ) -> dict[str, Any]:
        """See `stages.denoise`."""
        spec = model.spec

        def work(run: Run) -> dict[str, Any]:
            asked = guider.settings_for(run.found, settings, run.progress)
            config = run.found.config(spec.component(spec.experts[0]), run.progress)
            given = conditioning.denoiser_inputs(spec, config, asked, prompt_embeds, negative_prompt_embeds, condition)
            vae_config = run.found.config(spec.component(spec.vae), run.progress)
            sample = run.solve(asked, config, given)
            return {"samples": spec.denormalize_latents(sample, asked, vae_config)}

        return self._stage("denoise", model, progress, work, settings)

    def decode(self, model: ModelRef, latents: dict[str, Any], progress: Progress) -> torch.Tensor:
        """See `stages.decode`."""
        spec = model.spec
        samples = conditioning.latent_samples(spec, latents)

        def work(run: Run) -> torch.Tensor:
            run.progress.text("Decoding")
            frames = []
            for sample in samples:
                for chunk in spec.decode(run.call, sample[None], run.report("chunk")):
                    frames.append(torch.from_numpy(np.array(chunk)))
            return torch.cat(frames)

        return self._stage("decode", model, progress, work)

    def warmup(self, model: ModelRef, settings: Settings, progress: Progress) -> int:
        """See `stages.warmup`."""

        def work(run: Run) -> int:
            before = self.counts["compile"]
            run.warm(settings)
            return self.counts["compile"] - before

        return self._stage("warmup", model, progress, work, settings)

    def free(self, ids: Iterable[str] | None = None) -> None:
        """Drops weights and compiled programs; with `ids`, the weights of those residents alone."""
        with self._lock:
            if ids is not None:
                self.weight_cache.drop(ids)
                return
            self.weight_cache.clear()

    def forget_prompts(self) -> None:
        """Drops the encoded prompts kept in host memory."""
        with self._lock:
            self._prompts.forget()

    # -- how a stage runs ----------------------------------------------------------------------------------------------

    def _stage(
        self,
        name: str,
        model: ModelRef,
        progress: Progress,
        work: "Callable[[Run], Result]",
        settings: Settings | None = None,
    ) -> Result:
        """One stage at a time, without gradients; ComfyUI calls nodes in inference mode, which torchax cannot use."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            activity = telemetry.Activity(stage=name, model=model.model_id)
            precision = precisions.resolve(model.precision, self.devices[0].platform)
            run = Run(
                engine=self,
                found=model.locate(),
                target=Target(devices=self.devices, precision=precision),
                progress=telemetry.Watched(host=progress, activity=activity),
            )
            self.activity = activity
            try:
                run.found.prepare(run.progress)
                result = self._within_memory(run, work, settings)
            finally:
                self.activity = None
                self.note_peak()
            self._finished(activity)
            return result

    def _within_memory(self, run: "Run", work: "Callable[[Run], Result]", settings: Settings | None) -> Result:
        """Runs `work`; out of memory, once more with everything unloaded. Then `OutOfMemory` says what would fit.

        What the compiler refuses is not tried again: its answer does not depend on what is loaded.
        """
        stage = run.progress.activity.stage
        reason = ""
        for attempt in (1, 2):
            try:
                return work(run)
            except refusal.DoesNotFit as error:
                sentence = memory_advice.compiler_sentence(run.spec, stage, settings, error.refused, len(self.devices))
                raise OutOfMemory(sentence) from None
            except OutOfMemory as error:
                reason, attempt = str(error), 2  # nothing that may leave is in its way
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                reason = str(error).partition("\n")[0]
            # Here, not above: the error's traceback holds arrays.
            self.free()
            if attempt == 2:
                break
            log.warning("%s: out of memory (%s); everything was unloaded, trying once more.", stage, reason)
            run.progress.text("Out of memory: everything else was unloaded, trying once more")
        raise OutOfMemory(memory_advice.sentence(run.spec, stage, settings, reason, len(self.devices)))

    def _finished(self, activity: telemetry.Activity) -> None:
        """Adds a stage to the run it belongs to; decoding ends a run, and warming up is none."""
        if activity.stage not in GENERATION:
            return
        if self._run is None or self._run.model != activity.model or activity.stage in dict(self._run.stages):
            self._run = telemetry.LastRun(model=activity.model)
        self._run.stages.append((activity.stage, time.monotonic() - activity.started))
        if activity.stage == "denoise" and activity.seconds_per_unit:
            self._run.steps_per_second = 1 / activity.seconds_per_unit
        self._run.peak_hbm = max(self._run.peak_hbm or 0, activity.needed_bytes)
        self.last_run = self._run
        if activity.stage == "decode":
            log.info("%s", self._run)
            self._run = None

    def note_peak(self) -> list[int]:
        """Bytes held on each device now; remembers the most."""
        held = devices.held_bytes(self.devices)
        self.peak_bytes = [max(pair) for pair in zip(held, self.peak_bytes, strict=True)]
        return held

    # -- what stages need --------------------------------------------------------------------------------------------

    def executable(
        self, title: str, key: tuple[Any, ...], progress: telemetry.Watched, build: Callable[[], Program]
    ) -> Executable:
        """The program for `key`: of this process, of an earlier one, or compiled."""
        digest = signature(*(json.dumps(part, sort_keys=True) if isinstance(part, dict) else part for part in key))
        if (loaded := self.weight_cache.program(digest)) is not None:
            return loaded
        stored = executables.is_stored(digest, self.devices)
        progress.text(f"Loading the program of {title}" if stored else f"Compiling {title} (once for this size)")
        progress.check_cancelled()
        with _flagged(progress.activity):
            found, is_new = executables.obtain(digest, build, self.devices)
        self.weight_cache.add_program(digest, found)
        self.counts["compile"] += is_new
        progress.check_cancelled()
        return found

    def weights(
        self, found: Checkpoint, component: Component, executable: step_reuse.Runnable, progress: telemetry.Watched
    ) -> Weights:
        """A component's weights as `executable` wants them, loaded if they are not resident."""
        wanted = executable.program.args[0]

        def read() -> Weights:
            self.counts["load"] += 1
            folder = found.fetch_weights(component, progress)
            network = modules.build(component, found.config(component, progress))
            files = checkpoint.match(network, checkpoint.read_headers(folder, component), folder)
            return load.load(network, files, wanted, f"{component.name} of {found.model_id}", progress)

        identity = found.identity(component.folder, progress)
        key = (component.name, identity, executable.program.precision)
        resident = self.weight_cache.get(
            key,
            component=component.name,
            model=found.model_id,
            size_bytes=weights.bytes_per_chip(wanted),
            running=executable,
            load=read,
        )
        needed = self.weight_cache.size_bytes + self.weight_cache.code_bytes + executable.workspace_bytes
        progress.activity.needed_bytes = max(progress.activity.needed_bytes, needed)
        return resident.weights


@contextlib.contextmanager
def _flagged(activity: telemetry.Activity) -> Iterator[None]:
    activity.compiling = True
    try:
        yield
    finally:
        activity.compiling = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage at work: an engine, the checkpoint, the target and the host that watches."""

    engine: Engine
    found: Checkpoint
    target: Target
    progress: telemetry.Watched

    @property
    def spec(self) -> ModelSpec:
        return self.found.spec

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
        partition: Partition = "replicated",
        carries: bool = False,
    ) -> tuple[Any, Any]:
        """Runs a network; see `spec.Call`."""
        args = jax.tree.map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, args)
        run = self.prepare(component, function, args, partition, carries)
        weights = self.engine.weights(self.found, self.spec.component(component), run, self.progress)
        self.progress.check_cancelled()
        result, carried, is_finite = run(weights, *args)
        result, is_finite = jax.device_get((result, is_finite))
        if not is_finite:
            raise self.not_finite(f"values of the {component.replace('_', ' ')}")
        return result, carried

    def not_finite(self, what: str) -> finite.NotFinite:
        return finite.failure(self.spec.title, what, self.target.precision)

    def prepare(
        self,
        component: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        partition: Partition,
        carries: bool,
    ) -> Executable:
        """The program of a call."""
        config = self.found.config(self.spec.component(component), self.progress)
        return self.engine.executable(
            f"the {component.replace('_', ' ')}",
            (self.spec.name, config, self.target, *network_call.call_key(component, function, args, partition)),
            self.progress,
            lambda: network_call.call_program(
                self.spec, component, config, self.target, function, network_call.abstract_args(args),
                partition=partition, carries=carries,
            ),
        )  # fmt: skip

    def warm(self, settings: Settings) -> None:
        """Compiles every program of a generation of this size that is not compiled yet; loads no weights."""

        def prepare(
            component: str,
            function: Callable[..., tuple[Any, Any]],
            *args: Any,
            partition: Partition = "replicated",
            carries: bool = False,
        ) -> tuple[Any, Any]:
            return self.prepare(component, function, args, partition, carries).program.zeros

        spec = self.spec
        rehearsal.rehearse(spec, settings, self.found.config(spec.component(spec.vae), self.progress), prepare)
        config = self.found.config(spec.component(spec.experts[0]), self.progress)
        settings = guider.settings_for(self.found, settings, self.progress)
        self._denoiser(settings, config, self._solver(settings), {})

    def encode_text(self, text: TextEncoding, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """States `[rows, max_length, dim]` and lengths `[rows]` of one text encoder."""
        tokenizer = tokens.load_tokenizer(self.found.folder(text.tokenizer_folder, self.progress))
        ids, mask = text.tokenize(tokenizer, prompts)
        self.progress.text("Encoding the prompt")
        states, _ = self.call(text.component, text.encode, ids, mask)
        return states, mask.sum(axis=1).astype(np.int32)

    def solve(self, settings: Settings, config: dict[str, Any], given: dict[str, np.ndarray]) -> torch.Tensor:
        """All denoising steps. Waits for each, so that progress is true and a cancel stops within one step."""
        spec, progress = self.spec, self.progress
        solver = self._solver(settings)
        run = self._denoiser(settings, config, solver, given)
        generator = torch.Generator().manual_seed(settings.seed)

        def draw() -> np.ndarray:
            return spec.noise(spec, settings, generator).numpy()

        state = solver_table.initial_state(draw(), solver.num_memory)
        noises = solver.noises(draw)
        noise = next(noises)
        on_device = jax.tree.map(lambda x, want: jax.device_put(x, want.sharding), given, run.program.args[4])
        experts = self._experts(solver, settings)
        running = experts[0][0]
        weights = self.engine.weights(self.found, spec.component(running), run, progress)
        progress.text(f"Denoising, {solver.num_steps} steps")
        progress.step(0, solver.num_steps, "step")
        for index, (expert, scale) in enumerate(experts):
            progress.check_cancelled()
            if expert != running:
                running, weights = expert, self.engine.weights(self.found, spec.component(expert), run, progress)
            row, timestep = solver.table[index], solver.timesteps[index]
            state = solver_table.with_noise(tuple(state), noise)
            *state, denoised, is_finite = run(weights, state, row, timestep, on_device, np.float32(scale))
            noise = next(noises, None)  # drawn while the devices are at work
            if not is_finite:  # waits for the step
                raise self.not_finite(f"from step {index + 1} of {solver.num_steps} on, the latents")
            self._stepped(index + 1, solver.num_steps, denoised)
        return torch.from_numpy(np.array(state[0]))

    def _stepped(self, done: int, total: int, denoised: jax.Array) -> None:
        def latents() -> torch.Tensor:
            return torch.from_numpy(np.array(denoised))

        self.progress.step(done, total, "step", Preview(latent_format=self.spec.latent_format, latents=latents))
        if seconds := self.progress.activity.seconds_per_unit:
            self.progress.text(f"Denoising, step {done} of {total}, {seconds:.2f} s a step")

    def _solver(self, settings: Settings) -> solver_table.SolverTable:
        config = read_json(self.found.folder("scheduler", self.progress) / "scheduler_config.json")
        return network_call.solver(self.spec, config, settings)

    def _denoiser(
        self, settings: Settings, config: dict[str, Any], solver: solver_table.SolverTable, given: dict[str, np.ndarray]
    ) -> Executable | step_reuse.CachedDenoiser:
        """What is called for each step. With a step cache it is two programs, both compiled before the first step."""
        experts = [expert for expert, _ in self._experts(solver, settings)]
        is_full = step_cache.full_steps(settings.step_cache, experts)
        compiled = functools.partial(self._step, settings, config, solver, given)
        if self.spec.step_reuse is None or all(is_full):
            return compiled()
        full = compiled("keep")
        cached = compiled(step_reuse.kept_shapes(self.spec.step_reuse, full.program))
        return step_reuse.CachedDenoiser(full=full, cached=cached, is_full=is_full)

    def _step(
        self,
        settings: Settings,
        config: dict[str, Any],
        solver: solver_table.SolverTable,
        given: dict[str, np.ndarray],
        features: Literal["keep"] | step_reuse.Shapes | None = None,
    ) -> Executable:
        spec = self.spec
        shape = spec.geometry.latent_shape(settings)
        references = {name: x.shape for name, x in given.items() if spec.references and name.startswith("reference_")}
        kind = features if features in (None, "keep") else "reuse"
        bounded = all(
            score_bound.is_bounded(spec, component, self.found.fetch_weights(component, self.progress))
            for component in map(spec.component, spec.experts)
        )
        return self.engine.executable(
            f"the denoiser for {settings.width}x{settings.height}, {settings.num_frames} frames",
            ("denoise", spec.name, config, self.target, shape, spec.branches(settings), solver.num_memory,
             solver.timesteps.dtype, kind, bounded, *references.items()),
            self.progress,
            lambda: denoise_step.denoise_program(
                spec, config, self.target, settings, num_memory=solver.num_memory,
                timestep_dtype=solver.timesteps.dtype, references=references, features=features,
                bounded=bounded,
            ),
        )  # fmt: skip

    def _experts(self, solver: solver_table.SolverTable, settings: Settings) -> list[tuple[str, float]]:
        """Which denoiser runs at each step, and its guidance: the first above the checkpoint's boundary, then another.

        As upstream: the boundary is a share of the scheduler's training timesteps.
        """
        first, scale = self.spec.experts[0], settings.guidance_scale
        if len(self.spec.experts) == 1:
            return [(first, self.spec.guidance_at(settings, timestep)) for timestep in solver.timesteps.tolist()]
        scheduler = read_json(self.found.folder("scheduler", self.progress) / "scheduler_config.json")
        boundary = self.found.index(self.progress)["boundary_ratio"] * scheduler.get("num_train_timesteps", 1000)
        second_scale = scale if settings.guidance_scale_2 is None else settings.guidance_scale_2
        second = (self.spec.experts[1], second_scale)
        return [(first, scale) if timestep >= boundary else second for timestep in solver.timesteps]

"""Run in a process of its own: wrappers, callbacks and functions of other packs on core's torch MODEL and on ours.

Arguments: ComfyUI's folder and the file of a miniature of Wan. What each is called with is noted on core's MODEL and
must be the same on ours, in the same order, and so must the latents. Prints by case a relative L2 or the sentence with
which it is refused, as JSON, last.
"""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

KINDS = (
    "OUTER_SAMPLE", "PREPARE_SAMPLING", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL",
    "DIFFUSION_MODEL",
)  # fmt: skip
CALLBACKS = (
    "ON_CLONE", "ON_LOAD", "ON_DETACH", "ON_CLEANUP", "ON_PRE_RUN", "ON_PREPARE_STATE", "ON_APPLY_HOOKS",
    "ON_REGISTER_ALL_HOOK_PATCHES",
)  # fmt: skip


def main(comfyui: str, path: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd
    import torch
    from comfyui_tpu.nodes.comfyui import core_model
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    with torch.inference_mode():
        theirs = comfy.sd.load_diffusion_model(path, {"dtype": torch.float32})
        ours = core_model.load_model(path, "float32", SilentProgress)
        cases = Cases()
        found = {name: cases.compare(use, theirs, ours) for name, use in cases.uses().items()}
        theirs.set_model_compute_dtype(torch.bfloat16)
        ours = core_model.load_model(path, "bfloat16", SilentProgress)
        found["EasyCache in bfloat16"] = cases.compare(cases.cached, theirs, ours)
    print(json.dumps(found))


class Cases:
    """Their prompts, and what a case has noted."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(2)
        self.torch, self.noted = torch, []  # type: ignore[var-annotated]
        self.states = [0.4 * torch.randn(1, 512, 4096) for _ in range(2)]

    def uses(self) -> dict[str, Callable[[Any], Any]]:
        # Around the network alone, and alone inside the batch, too: each kind has a way of its own through ours.
        return {
            **{kind: lambda model, kind=kind: self.sample(self.wrapped(model, kind)) for kind in KINDS},
            "all kinds": lambda model: self.sample(self.wrapped(model, *KINDS)),
            "before": self.before,
            "written conditionings": self.written,
            "written results": self.written_results,
            "callbacks": self.called_back,
            "functions": self.functions,
            "options of a hook": self.hooked,
            "skipped": self.skipped,
            "replaced forward": self.replaced,
            "injections": self.injected,
        }

    def compare(self, use: Callable[[Any], Any], theirs: Any, ours: Any) -> float | str:
        try:
            self.noted = []
            found, own = use(ours.clone()), self.noted
        except ValueError as error:
            return str(error)
        self.noted = []
        wanted = use(theirs.clone())
        assert own == self.noted, (own, self.noted)
        assert found.isfinite().all()
        return ((found - wanted).norm() / wanted.norm()).item()

    def sample(self, model: Any, cfg: float = 4.0, hooks: Any = None, steps: int = 2) -> Any:
        import nodes

        positive, negative = ([[one.clone(), {}]] for one in self.states)
        if hooks is not None:
            import comfy.hooks

            positive = comfy.hooks.set_hooks_for_conditioning(positive, hooks)
        latent = {"samples": self.torch.zeros(1, 16, 3, 8, 6)}
        return nodes.common_ksampler(model, 5, steps, cfg, "euler", "simple", positive, negative, latent)[0]["samples"]

    def wrapper(self, name: str, factor: float = 1.01) -> Callable[..., Any]:
        """Notes that it was called, with which rows, and changes what comes back."""

        def wrap(execute: Any, *args: Any, **named: Any) -> Any:
            options = named.get("transformer_options") or next((one for one in args if isinstance(one, dict)), {})
            rows = [len(one) for one in args if isinstance(one, self.torch.Tensor) and one.ndim == 5]
            self.noted.append((name, rows, options.get("cond_or_uncond"), len(options.get("uuids", ()))))
            found = execute(*args, **named)
            self.noted.append(f"{name} ends")
            if isinstance(found, self.torch.Tensor):
                return factor * found
            return [factor * one for one in found] if isinstance(found, list) else found

        return wrap

    def wrapped(self, model: Any, *kinds: str) -> Any:
        from comfy.patcher_extension import WrappersMP

        for kind in kinds:
            model.add_wrapper(getattr(WrappersMP, kind), self.wrapper(f"first {kind}"))
            model.add_wrapper_with_key(getattr(WrappersMP, kind), "another", self.wrapper(f"second {kind}", 0.99))
        return model

    def before(self, model: Any) -> Any:
        """Wrappers that stand before ours among core's: in the options, and of a MODEL whose own are taken out."""
        from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

        for kind in KINDS[3:]:
            wrapper = self.wrapper(f"before {kind}")
            add_wrapper_with_key(
                getattr(WrappersMP, kind), "early", wrapper, model.model_options, is_model_options=True
            )
        own = model.wrappers.pop(WrappersMP.CALC_COND_BATCH, {})
        model.add_wrapper(WrappersMP.CALC_COND_BATCH, self.wrapper("in front", 0.98))
        model.wrappers[WrappersMP.CALC_COND_BATCH] |= own
        model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "behind", self.wrapper("behind", 1.03))
        return self.sample(model)

    def written(self, model: Any) -> Any:
        """A wrapper that writes into the conditionings at each step."""
        from comfy.patcher_extension import WrappersMP

        def wrap(execute: Any, model: Any, conds: Any, *args: Any) -> Any:
            for cond in conds:
                cond[0]["model_conds"]["c_crossattn"].cond.mul_(0.8)
            return execute(model, conds, *args)

        model.add_wrapper(WrappersMP.CALC_COND_BATCH, wrap)
        return self.sample(model)

    def written_results(self, model: Any) -> Any:
        """Wrappers that write into the sample and the results that they are given."""
        from comfy.patcher_extension import WrappersMP

        def wrap(execute: Any, x: Any, *args: Any, **named: Any) -> Any:
            x[:, :, 1] *= 0.9
            found = execute(x, *args, **named)
            found[:1] += 0.01
            return found

        model.add_wrapper(WrappersMP.DIFFUSION_MODEL, wrap)
        model.add_wrapper(WrappersMP.APPLY_MODEL, wrap)
        return self.sample(model)

    def called_back(self, model: Any) -> Any:
        from comfy.patcher_extension import CallbacksMP

        for name in CALLBACKS:
            note = lambda *args, name=name: self.noted.append((name, len(args)))  # noqa: E731
            model.add_callback(getattr(CallbacksMP, name), note)
        again = model.clone()
        found = [self.sample(again), self.sample(again, cfg=1.0)]
        again.detach()
        return self.torch.cat([*found, self.sample(again)])

    def functions(self, model: Any) -> Any:
        """`set_model_...` of all that a sampler looks at."""
        import comfy.samplers

        def note(name: str) -> None:
            self.noted.append(name)

        def pre(args: Any) -> Any:
            note("pre")
            return [1.02 * one for one in args["conds_out"]]

        def batch(args: Any) -> Any:
            note("batch")
            options = {**args["model_options"], "sampler_calc_cond_batch_function": None}
            found = comfy.samplers.calc_cond_batch(args["model"], args["conds"], args["input"], args["sigma"], options)
            return [0.97 * one for one in found]

        def unet(apply: Any, args: Any) -> Any:
            note(f"unet {args['cond_or_uncond']} {len(args['input'])}")
            return 1.01 * apply(args["input"], args["timestep"], **args["c"])

        parts = {
            "model_sampler_pre_cfg_function": pre,
            "model_sampler_calc_cond_batch_function": batch,
            "model_unet_function_wrapper": unet,
            "model_sampler_cfg_function": lambda cond, uncond, scale: uncond + 0.9 * scale * (cond - uncond),
            "model_sampler_post_cfg_function": lambda args: 0.99 * args["denoised"],
        }
        found, together = [], model.clone()
        for name, function in parts.items():
            one = model.clone()
            getattr(one, f"set_{name}")(function)
            getattr(together, f"set_{name}")(function)
            found.append(self.sample(one))
        return self.torch.cat([*found, self.sample(together)])

    def hooked(self, model: Any) -> Any:
        """Wrappers that hang on a conditioning, for it alone and for all."""
        import comfy.hooks
        from comfy.patcher_extension import WrappersMP

        found = []
        for scope in comfy.hooks.EnumHookScope:
            group = comfy.hooks.HookGroup()
            options = {"wrappers": {WrappersMP.APPLY_MODEL: {"hook": [self.wrapper(scope.value)]}}}
            group.add(comfy.hooks.TransformerOptionsHook(options, scope))
            found.append(self.sample(model, hooks=group))
        return self.torch.cat(found)

    def cached(self, model: Any) -> Any:
        """EasyCache writes into the sample; in bfloat16 core gives it a copy of the sampler's."""
        from comfy_extras.nodes_easycache import EasyCacheNode

        return self.sample(EasyCacheNode.execute(model, 0.9, 0.1, 0.95, False).result[0], steps=6)

    def skipped(self, model: Any) -> Any:
        """A wrapper of the network that answers every second call by itself."""
        from comfy.patcher_extension import WrappersMP

        kept: list[Any] = []

        def wrap(execute: Any, x: Any, *args: Any, **named: Any) -> Any:
            self.noted.append(len(x))
            if kept:
                return kept.pop()
            kept.append(execute(x, *args, **named))
            return kept[0]

        model.add_wrapper(WrappersMP.DIFFUSION_MODEL, wrap)
        return self.sample(model)

    def replaced(self, model: Any) -> Any:
        """As packs put another forward into core's network for the time of a call."""

        def unet(apply: Any, args: Any) -> Any:
            network = model.model.diffusion_model
            with mock.patch.object(network, "forward_orig", lambda *more, **named: None):
                return apply(args["input"], args["timestep"], **args["c"])

        model.set_model_unet_function_wrapper(unet)
        return self.sample(model)

    def injected(self, model: Any) -> Any:
        from comfy.patcher_extension import PatcherInjection

        model.set_injections("another", [PatcherInjection(lambda patcher: None, lambda patcher: None)])
        return self.sample(model)


if __name__ == "__main__":
    main(*sys.argv[1:])

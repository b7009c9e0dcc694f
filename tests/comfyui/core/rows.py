"""Graphs for `core_graphs`: what hangs on a MODEL between its steps, what conditionings lack, and rows that differ."""

from collections.abc import Callable
from typing import Any

Graph = Callable[[Any, Any], Any]


def with_cache_node(name: str) -> Graph:
    """With a cache of core's, which leaves steps out, on both models the same ones."""

    def sample(graphs: Any, model: Any) -> Any:
        from comfy_extras import nodes_easycache

        node, holder = (getattr(nodes_easycache, f"{name}{what}") for what in ("Node", "Holder"))
        skipped, reset = [], holder.reset

        def noted(self: Any) -> Any:
            skipped.append(self.total_steps_skipped)
            return reset(self)

        holder.reset = noted
        try:
            found = graphs.sample(node.execute(model, 0.5, 0.15, 0.95, False).result[0], steps=8)
        finally:
            holder.reset = reset
        assert 1 < skipped[-1] < 7, skipped
        assert graphs.said.setdefault(name, skipped) == skipped
        return found

    return sample


def change_conditioning(graphs: Any, number: int, **values: Any) -> Any:
    """A prompt with other values in its conditioning; without those that are None and no node's."""
    states, info = graphs.prompts[number][0]
    return [[states, {**info, **values}]]


def without(graphs: Any, number: int, *names: str) -> Any:
    states, info = graphs.prompts[number][0]
    return [[states, {name: value for name, value in info.items() if name not in names}]]


def no_guidance(graphs: Any, model: Any) -> Any:
    """FluxDisableGuidance."""
    return graphs.sample(model, steps=2, positive=change_conditioning(graphs, 0, guidance=None))


def default_guidance(graphs: Any, model: Any) -> Any:
    return graphs.sample(model, steps=2, positive=without(graphs, 0, "guidance"))


def unlike_guidance(graphs: Any, model: Any) -> Any:
    """FluxGuidance on the prompt alone, and another on the negative one."""
    both = {"positive": change_conditioning(graphs, 0, guidance=6.0), "negative": without(graphs, 1, "guidance")}
    first = graphs.sample(model, steps=2, cfg=3.0, **both)
    both = {
        "positive": change_conditioning(graphs, 0, guidance=None),
        "negative": change_conditioning(graphs, 1, guidance=1.5),
    }
    return graphs.torch.cat([first, graphs.sample(model, steps=2, cfg=3.0, **both)])


def unlike_references(graphs: Any, model: Any) -> Any:
    """Two pictures beside the prompt, one or none beside the negative one; and as many of other sizes."""
    first = graphs.prompts[0][0][1]["reference_latents"]
    rows = [first[:1], [first[1], first[0]]]
    found = [
        graphs.sample(model, steps=1, cfg=3.0, negative=change_conditioning(graphs, 1, reference_latents=row))
        for row in rows
    ]
    found.append(graphs.sample(model, steps=1, cfg=3.0, negative=without(graphs, 1, "reference_latents")))
    return graphs.torch.cat(found)


def no_pictures(graphs: Any, model: Any) -> Any:
    """A model of image to video without CLIP's view, on both rows and on one; and without the picture on one."""
    names = ("clip_vision_output",), ("concat_latent_image", "concat_mask")
    both = [without(graphs, number, *names[0]) for number in (0, 1)]
    found = [
        graphs.sample(model, steps=2, positive=both[0], negative=both[1]),
        graphs.sample(model, steps=2, negative=both[1]),
        graphs.sample(model, steps=2, negative=without(graphs, 1, *names[1])),
    ]
    return graphs.torch.cat(found)


def two_seen(graphs: Any, model: Any) -> Any:
    """CLIP's view of a first and a last picture, for a model that was trained with one."""
    from types import SimpleNamespace

    seen = graphs.draw_again(1, 514, 1280)
    given = SimpleNamespace(penultimate_hidden_states=seen, last_hidden_state=seen)
    return graphs.sample(model, steps=2, positive=change_conditioning(graphs, 0, clip_vision_output=given))


def no_glyphs(graphs: Any, model: Any) -> Any:
    """No row has glyphs."""
    both = [without(graphs, number, "conditioning_byt5small") for number in (0, 1)]
    return graphs.sample(model, steps=2, positive=both[0], negative=both[1])


def joined_prompts(graphs: Any, model: Any) -> Any:
    """ConditioningConcat: more tokens than an encoder takes at once."""
    import nodes

    both = nodes.ConditioningConcat().concat(graphs.prompts[0], graphs.prompts[2])[0]
    return graphs.sample(model, steps=2, positive=both)


def unlike_timesteps(graphs: Any, model: Any) -> Any:
    """A sampler whose rows are at steps of their own."""
    import comfy.samplers

    def sampled(inner: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any, **more: Any) -> Any:
        own = graphs.torch.stack([sigmas[0], sigmas[1]])
        return x - inner(x, own, **extra_args)

    kept = comfy.samplers.sampler_object("euler")
    kept.sampler_function = sampled
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(graphs.prompts[0], graphs.prompts[1])
    guider.set_cfg(graphs.job.get("cfg", 5.0))
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)
    noise = graphs.torch.cat([graphs.given, 0.5 * graphs.given])
    return guider.sample(noise, graphs.torch.zeros_like(noise), kept, sigmas)


def two_models(graphs: Any, model: Any) -> Any:
    """DualModelGuider, whose other model is one of core's own."""
    import comfy.samplers
    import comfy.sd
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    other = comfy.sd.load_diffusion_model(graphs.job["path"], {"dtype": graphs.torch.float32})
    guider = Guider_DualModel(model, other)
    guider.set_conds(graphs.prompts[0], graphs.prompts[1])
    guider.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 2)
    return guider.sample(
        graphs.given, graphs.torch.zeros_like(graphs.given), comfy.samplers.sampler_object("euler"), sigmas
    )


def free_noise(graphs: Any, model: Any) -> Any:
    """Windows in another order, whose wrappers also draw the noise and prepare the sampling."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    windowed = WanContextWindowsManualNode.execute(model, 17, 5, "looped_uniform", 2, True, "overlap-linear", True)
    return graphs.sample(windowed.result[0], latent={"samples": graphs.torch.zeros(1, 16, 9, 8, 6)}, steps=2)


CASES: dict[str, Graph] = {
    "EasyCache": with_cache_node("EasyCache"),
    "LazyCache": with_cache_node("LazyCache"),
    "no guidance": no_guidance,
    "default guidance": default_guidance,
    "unlike guidance": unlike_guidance,
    "unlike references": unlike_references,
    "no pictures": no_pictures,
    "two seen": two_seen,
    "no glyphs": no_glyphs,
    "joined prompts": joined_prompts,
    "unlike timesteps": unlike_timesteps,
    "two models": two_models,
    "free noise": free_noise,
}

"""HunyuanVideo 1.5's other checkpoints: for 480p, CFG-distilled, step-distilled.

Their numbers are those of diffusers' `scripts/convert_hunyuan_video1_5_to_diffusers.py`, which converted them. Where a
checkpoint's guider has scale 1 (see `guider`), a step runs one branch. The step-distilled checkpoint is a mean flow
(https://arxiv.org/abs/2505.13447): it also takes the timestep at which a step ends, and predicts the mean velocity up
to there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....sharding.rules import GATHERED, Rule
from ...model_spec import Component, ConfigRequirement, ModelSpec
from . import i2v
from .spec import SPEC

_BY_TASK = {"t2v": SPEC, "i2v": i2v.SPEC}
# Upstream's size for 16:9 with a `target_size` of 640.
_DEFAULTS_480P = {"height": 480, "width": 848}


def _for_480p(transformer: Component) -> Component:
    return transformer.derive(config={"target_size": 640}, tiny={"target_size": 640})


def _as_mean_flow(transformer: Component) -> Component:
    return transformer.derive(
        config={"use_meanflow": True},
        tiny={"use_meanflow": True},
        needs={"use_meanflow": ConfigRequirement((True,), required=True)},
        rules=(Rule("time_embed.timestep_embedder_r.*.weight", *GATHERED),),
        original_keys={
            "time_r_in.mlp.0": "time_embed.timestep_embedder_r.linear_1",
            "time_r_in.in_layer": "time_embed.timestep_embedder_r.linear_1",
            "time_r_in.mlp.2": "time_embed.timestep_embedder_r.linear_2",
            "time_r_in.out_layer": "time_embed.timestep_embedder_r.linear_2",
        },
    )


def _sibling(
    checkpoint: str,
    *,
    shift: float,
    guidance_scale: float = 1.0,
    transformer: Component,
    defaults: Mapping[str, Any] = {},
) -> ModelSpec:
    """Return the spec of a checkpoint, derived from the 720p model of its task.

    checkpoint: the model authors' name. shift: the scheduler's. defaults: of inputs, where they differ.
    """
    size, task, *recipe = checkpoint.split("_")
    spec, kind = _BY_TASK[task], "-".join([size, *recipe])
    defaults = {**defaults, "guidance_scale": guidance_scale}
    return replace(
        spec,
        name=f"hunyuanvideo1.5-{task}-{kind}",
        title=f"{spec.title} {kind}",
        published=replace(
            spec.published,
            hub_id=f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{checkpoint}",
            files={
                **spec.published.files,
                "guider/guider_config.json": {
                    "_class_name": "ClassifierFreeGuidance",
                    "guidance_scale": guidance_scale,
                },
            },
        ),
        miniature=replace(spec.miniature, id=f"{spec.miniature.id}-{kind}"),
        components=tuple(transformer if item.name == transformer.name else item for item in spec.components),
        inputs={**spec.inputs, **{name: replace(spec.inputs[name], default=defaults[name]) for name in defaults}},
        recipe=replace(spec.recipe, scheduler={**spec.recipe.scheduler, "shift": shift}),
    )


_T2V, _I2V = (_for_480p(spec.component("transformer")) for spec in _BY_TASK.values())

T2V_480P = _sibling("480p_t2v", shift=5.0, guidance_scale=6.0, transformer=_T2V, defaults=_DEFAULTS_480P)
I2V_480P = _sibling("480p_i2v", shift=5.0, guidance_scale=6.0, transformer=_I2V, defaults=_DEFAULTS_480P)
T2V_480P_DISTILLED = _sibling("480p_t2v_distilled", shift=5.0, transformer=_T2V, defaults=_DEFAULTS_480P)
I2V_480P_DISTILLED = _sibling("480p_i2v_distilled", shift=5.0, transformer=_I2V, defaults=_DEFAULTS_480P)
I2V_720P_DISTILLED = _sibling("720p_i2v_distilled", shift=7.0, transformer=i2v.SPEC.component("transformer"))
I2V_480P_STEP_DISTILLED = _sibling(
    "480p_i2v_step_distilled",
    shift=7.0,
    transformer=_as_mean_flow(_I2V),
    # The model authors recommend 8 or 12.
    defaults={**_DEFAULTS_480P, "num_inference_steps": 12},
)

SIBLINGS = (T2V_480P, I2V_480P, T2V_480P_DISTILLED, I2V_480P_DISTILLED, I2V_720P_DISTILLED, I2V_480P_STEP_DISTILLED)

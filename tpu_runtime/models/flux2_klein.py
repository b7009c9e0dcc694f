"""Flux.2 klein: black-forest-labs/FLUX.2-klein-4B and -9B, distilled, and the -base- ones, which are not. The oracle is
`diffusers.Flux2KleinPipeline`. The transformer is a smaller Flux.2, not told the guidance; the text encoder is Qwen3.

The published 9B configs are gated: its sizes are those of `Klein9BParams` in Black Forest Labs' repository.
"""

from dataclasses import replace

from ...sharding.shape import MeshShape
from ..limits import FloatLimit, IntLimit
from ..spec import Component, Need, Same, Settings
from . import flux2
from .text_encoders import qwen3

# What the makers distilled the models to.
STEPS = 4


def advise(settings: Settings) -> str | None:
    """Of a distilled model."""
    found = []
    if settings.guidance_scale > 1:
        found.append(f"guidance_scale is {settings.guidance_scale}, but it is distilled and runs without")
    if settings.num_inference_steps != STEPS:
        found.append(f"num_inference_steps is {settings.num_inference_steps}, but it is distilled to {STEPS}")
    return f"{'; '.join(found)}." if found else None


def guidance_beside_heads(num_devices: int, branches: int) -> MeshShape:
    """As Flux.2's, with guidance's two branches side by side where the count is even."""
    dp = 2 if branches == 2 and num_devices % 2 == 0 else 1
    return MeshShape(dp=dp, tp=num_devices // dp)


TRANSFORMER = replace(
    flux2.TRANSFORMER,
    config={
        **flux2.TRANSFORMER.config,
        "guidance_embeds": False,
        "joint_attention_dim": 7680,
        "num_attention_heads": 24,
        "num_layers": 5,
        "num_single_layers": 20,
    },
    tiny={**flux2.TRANSFORMER.tiny, "guidance_embeds": False, "num_attention_heads": 10},
    needs={
        **flux2.TRANSFORMER.needs,
        "guidance_embeds": Need((False,), required=True),
        "joint_attention_dim": Same("text_encoder", "hidden_size", times=len(qwen3.STATES)),
    },
    makers_names={theirs: own for theirs, own in flux2.MAKERS_NAMES.items() if not theirs.startswith("guidance_in.")},
)


def larger(component: Component, **sizes: object) -> Component:
    """The 9B model's."""
    return replace(component, config={**component.config, **sizes})


LARGER = (
    larger(qwen3.TEXT_ENCODER, **qwen3.LARGER),
    larger(TRANSFORMER, joint_attention_dim=12288, num_attention_heads=32, num_layers=8, num_single_layers=24),
)
VAE = flux2.SPEC.components[2:]

# One branch, and no negative prompt: upstream ignores guidance where a checkpoint says that it is distilled.
DISTILLED_4B = replace(
    flux2.SPEC,
    name="flux2-klein-4b",
    title="Flux.2 klein 4B",
    hub_id="black-forest-labs/FLUX.2-klein-4B",
    tiny_id="tiny/flux2klein",
    pipeline_classes=("Flux2KleinPipeline",),
    components=(qwen3.TEXT_ENCODER, TRANSFORMER, *VAE),
    text_encoders=(qwen3.TEXT,),
    inputs={
        **flux2.SPEC.inputs,
        "num_inference_steps": IntLimit(default=STEPS, low=1, high=100),
        "guidance_scale": FloatLimit(default=1.0, low=0.0, high=20.0),
    },
    texts={"prompt": qwen3.PROMPT},
    index={"is_distilled": True},
    advice=advise,
)
DISTILLED_9B = replace(
    DISTILLED_4B,
    name="flux2-klein-9b",
    title="Flux.2 klein 9B",
    hub_id="black-forest-labs/FLUX.2-klein-9B",
    tiny_id="tiny/flux2klein9b",
    components=(*LARGER, *VAE),
)
BASE_4B = replace(
    DISTILLED_4B,
    name="flux2-klein-base-4b",
    title="Flux.2 klein base 4B",
    hub_id="black-forest-labs/FLUX.2-klein-base-4B",
    tiny_id="tiny/flux2kleinbase",
    inputs=flux2.SPEC.inputs,
    texts={"prompt": qwen3.PROMPT, "negative_prompt": ""},
    guidance="cfg",
    index={},
    advice=flux2.SPEC.advice,
    mesh=guidance_beside_heads,
)
BASE_9B = replace(
    BASE_4B,
    name="flux2-klein-base-9b",
    title="Flux.2 klein base 9B",
    hub_id="black-forest-labs/FLUX.2-klein-base-9B",
    tiny_id="tiny/flux2kleinbase9b",
    components=(*LARGER, *VAE),
)

SIBLINGS = (DISTILLED_4B, DISTILLED_9B, BASE_4B, BASE_9B)

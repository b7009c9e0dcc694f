"""FLUX.2 klein: black-forest-labs/FLUX.2-klein-4B and -9B, distilled, and the -base- checkpoints, which are not.

The oracle is `diffusers.Flux2KleinPipeline`. The network is that of dev, smaller and without a guidance input; the text
encoder is Qwen3. The 4B checkpoints are licensed under Apache-2.0. The 9B ones are gated, under the FLUX non-commercial
license; their sizes here are those of `Klein9BParams` in https://github.com/black-forest-labs/flux2.
"""

from dataclasses import replace

from ....sharding.shape import MeshShape
from ...model_spec import (
    ConfigRequirement,
    EqualsConfig,
    FloatInput,
    HubCheckpoint,
    IntInput,
    ModelSpec,
    Parallelism,
    make_distilled_advice,
)
from ..common import qwen3
from . import core_inputs, transformer
from . import spec as dev
from .vae import VAE

# The number of steps that the models were distilled for, as their model cards say.
STEPS = 4


def shard_guidance_and_heads(num_devices: int, branches: int) -> MeshShape:
    """Return the mesh: heads split over all chips, or over each half of them per guidance branch.

    num_devices: chips. branches: 2 with guidance, else 1. An odd number of chips is not halved.
    """
    dp = 2 if branches == 2 and num_devices % 2 == 0 else 1
    return MeshShape(dp=dp, tp=num_devices // dp)


TRANSFORMER = transformer.TRANSFORMER.derive(
    config={
        "guidance_embeds": False,
        "joint_attention_dim": 7680,
        "num_attention_heads": 24,
        "num_layers": 5,
        "num_single_layers": 20,
    },
    tiny={"num_attention_heads": 10},
    needs={
        "guidance_embeds": ConfigRequirement((False,), required=True),
        "joint_attention_dim": EqualsConfig("text_encoder", "hidden_size", times=len(qwen3.STATES)),
    },
)


COMPONENTS = (qwen3.TEXT_ENCODER, TRANSFORMER, *VAE)
LARGER_COMPONENTS = (
    qwen3.TEXT_ENCODER.derive(config=qwen3.LARGER),
    TRANSFORMER.derive(
        config={"joint_attention_dim": 12288, "num_attention_heads": 32, "num_layers": 8, "num_single_layers": 24}
    ),
    *VAE,
)

MINIATURE = replace(dev.MINIATURE, id="tiny/flux2klein")

_CORE = replace(core_inputs.CORE, clip=core_inputs.KLEIN_4B)

# One branch and no negative prompt: upstream ignores guidance for checkpoints marked as distilled.
DISTILLED = replace(
    dev.SPEC,
    name="flux2-klein-4b",
    title="FLUX.2 klein 4B",
    published=HubCheckpoint(
        hub_id="black-forest-labs/FLUX.2-klein-4B",
        pipeline_classes=("Flux2KleinPipeline",),
        index={"is_distilled": True},
    ),
    miniature=MINIATURE,
    components=COMPONENTS,
    core=_CORE,
    text_encoders=(qwen3.TEXT,),
    inputs={
        **dev.INPUTS,
        "num_inference_steps": IntInput(default=STEPS, low=1, high=100),
        "guidance_scale": FloatInput(default=1.0, low=0.0, high=20.0),
    },
    texts={"prompt": qwen3.PROMPT},
    recipe=replace(dev.RECIPE, advice=make_distilled_advice(STEPS, "runs without")),
)
BASE = replace(
    dev.SPEC,
    name="flux2-klein-base-4b",
    title="FLUX.2 klein base 4B",
    published=HubCheckpoint(hub_id="black-forest-labs/FLUX.2-klein-base-4B", pipeline_classes=("Flux2KleinPipeline",)),
    miniature=replace(MINIATURE, id="tiny/flux2kleinbase", texts={**MINIATURE.texts, "negative_prompt": ""}),
    components=COMPONENTS,
    core=_CORE,
    text_encoders=(qwen3.TEXT,),
    texts={"prompt": qwen3.PROMPT, "negative_prompt": ""},
    recipe=replace(dev.RECIPE, guidance="cfg"),
    parallelism=Parallelism(mesh=shard_guidance_and_heads),
)


def derive_9b(spec: ModelSpec) -> ModelSpec:
    """Return the 9B sibling of a 4B spec."""
    return replace(
        spec,
        name=spec.name.replace("4b", "9b"),
        title=spec.title.replace("4B", "9B"),
        published=replace(spec.published, hub_id=spec.published.hub_id.replace("4B", "9B")),
        miniature=replace(spec.miniature, id=f"{spec.miniature.id}9b"),
        components=LARGER_COMPONENTS,
        core=replace(spec.core, clip=core_inputs.KLEIN_9B),
    )


SIBLINGS = (DISTILLED, derive_9b(DISTILLED), BASE, derive_9b(BASE))

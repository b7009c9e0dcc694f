"""Description of a model as data: networks, geometry, input limits, recipe, and function types. No torch here.

May import sharding only.
"""

from .component import Component, Json, Need, Rows, Same, Table, has_length, split, swapped
from .functions import Call, Forward, Report
from .groups import (
    Denoiser,
    HeadNorms,
    LatentGeometry,
    LightVae,
    Miniature,
    Parallelism,
    Pictures,
    Published,
    Recipe,
    StepReuse,
    TextEncoding,
    Vae,
    distilled,
    guidance_first,
    plain_guidance,
)
from .limits import (
    CHECKPOINT,
    DENSE_QUALITY,
    FLOW_SCHEDULERS,
    MAG_CACHE,
    PART,
    QUALITIES,
    SIZE,
    SPARSE,
    STEP_INPUTS,
    Choice,
    FloatLimit,
    IntLimit,
    Limit,
    Numbers,
    Settings,
    Switch,
    without_zero_sizes,
)
from .model import STAGES, ModelSpec
from .step_cache import Curve, MagCache, StepCache

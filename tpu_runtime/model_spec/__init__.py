"""Description of a model as data: networks, geometry, input limits, recipe, and function types. No torch here.

May import sharding only.
"""

from .component import (
    Component,
    ConfigRequirement,
    EqualsConfig,
    Json,
    KeyTable,
    RowSlice,
    require_length,
    split_rows,
    swap_halves,
)
from .control import ControlInput, ControlSpec
from .inputs import (
    CHECKPOINT,
    FLOW_SCHEDULERS,
    MAG_CACHE_INPUTS,
    SIZE_INPUTS,
    STEP_INPUTS,
    STEP_RANGE_INPUTS,
    BoolInput,
    EnumInput,
    FloatInput,
    InputType,
    IntInput,
    Settings,
    SigmaList,
    drop_zero_sizes,
    is_own,
)
from .model import STAGES, ModelSpec
from .protocols import Call, Forward, Report
from .quality import APPROXIMATE, COMMON_QUALITIES, QUALITIES, PlainEnum, Quality, describe_qualities
from .spec_parts import (
    DenoiserSpec,
    FeatureReuse,
    HeadNorms,
    HubCheckpoint,
    ImageConditioning,
    LatentGeometry,
    LightVae,
    Parallelism,
    SamplingConfig,
    TextEncoding,
    TinyModel,
    VaeSpec,
    classifier_free_guidance,
    make_distilled_advice,
    split_guidance_first,
)
from .step_cache import MagCache, MagCacheCurve, StepCache

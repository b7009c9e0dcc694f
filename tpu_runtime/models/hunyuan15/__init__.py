"""HunyuanVideo 1.5, text and image to video. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (text to video), `text_encoder` (Qwen2.5-VL and ByT5), `transformer` (the denoiser),
`vae`. `i2v`, with `image_encoder` (SigLIP), takes an image. `distilled` has further checkpoints. `single_file`,
`published_files` and `core_inputs` are for ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import distilled, i2v, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC, i2v.SPEC), siblings=distilled.SIBLINGS, layouts=LAYOUTS, files=FILES)

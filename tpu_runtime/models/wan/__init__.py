"""Wan 2.1 and 2.2, text and image to video. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (the text-to-video models), `text_encoder` (UMT5), `transformer` (the denoiser). `i2v`,
with `image_encoder` (CLIP), and `ti2v` take images. The VAE is `common/wan_vae`; `vae` adds that of 48 channels.
`single_file`, `published_files` and `core_inputs` are for ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import i2v, spec, ti2v
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(
    flagships=(spec.SPEC, i2v.SPEC), siblings=(*spec.SIBLINGS, *i2v.SIBLINGS, ti2v.SPEC), layouts=LAYOUTS, files=FILES
)

"""Qwen-Image and Edit, text and images to image. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (text to image), `text_encoder` (Qwen2.5-VL, of `common/qwen25`), `transformer` (the
denoiser), `control` (its control networks). `edit` takes images, also by `common/qwen25_vision`. The VAE is
`common/wan_vae`. `single_file`, `published_files` and `core_inputs` are for ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import control, edit, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=(edit.SPEC,), layouts=(*control.LAYOUTS, *LAYOUTS), files=FILES)

"""Z-Image, text to image. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (the models), `text_encoder` (Qwen3, of `common/qwen3`), `transformer` (the denoiser),
`control` (its control networks). The VAE is `common/kl`. `single_file`, `published_files` and `core_inputs` are for
ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import control, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=(spec.BASE,), layouts=(control.LAYOUT, *LAYOUTS), files=FILES)

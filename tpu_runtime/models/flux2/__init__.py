"""FLUX.2 dev and klein, text and images to image. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (dev), `text_encoder` (Mistral), `transformer` (the denoiser), `vae`. The text encoder
of `klein` is `common/qwen3`. The VAE's networks are those of `common/kl`. `single_file`, `published_files` and
`core_inputs` are for ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import klein, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=klein.SIBLINGS, layouts=LAYOUTS, files=FILES)

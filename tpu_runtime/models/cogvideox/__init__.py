"""CogVideoX 1.5, text and image to video. May import `models/common`, `formats`, `programs` and the leaves.

In the order of reading: `spec` (text to video), `text_encoder` (T5, of `common/t5`), `transformer` (the denoiser),
`vae`. `i2v` takes an image. `single_file`, `published_files` and `core_inputs` are for ComfyUI's files and nodes.
"""

from ..common.family import Family
from . import i2v, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=(i2v.SPEC,), layouts=LAYOUTS, files=FILES)

"""Single-file layouts: how a network's file is recognized, its original keys, and its config from shapes.

Key names are here only where no component has them. May import `formats` and the leaves.
"""

from ...formats.file_signature import FileLayout
from ..cogvideox import single_file as cogvideox
from ..common import encoder_single_files, kl_single_file, light_single_file
from ..flux2 import single_file as flux2
from ..hunyuan15 import single_file as hunyuan15
from ..qwen_image import single_file as qwen_image
from ..wan import single_file
from ..z_image import single_file as z_image

LAYOUTS: tuple[FileLayout, ...] = (
    *single_file.LAYOUTS,
    *flux2.LAYOUTS,
    *hunyuan15.LAYOUTS,
    *cogvideox.LAYOUTS,
    *z_image.LAYOUTS,
    *qwen_image.LAYOUTS,
    *kl_single_file.LAYOUTS,
    *light_single_file.LAYOUTS,
    *encoder_single_files.LAYOUTS,
)

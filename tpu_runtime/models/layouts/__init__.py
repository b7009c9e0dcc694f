"""Single files of the models: what tells each network, the makers' names of those that no component has, and which
config its tensors ask for. May import `formats` and the leaves.
"""

from ...formats.layout import FileLayout
from . import cogvideox, encoders, flux2, hunyuan15, kl, light, qwen_image, wan, z_image

LAYOUTS: tuple[FileLayout, ...] = (
    *wan.LAYOUTS,
    *flux2.LAYOUTS,
    *hunyuan15.LAYOUTS,
    *cogvideox.LAYOUTS,
    *z_image.LAYOUTS,
    *qwen_image.LAYOUTS,
    *kl.LAYOUTS,
    *light.LAYOUTS,
    *encoders.LAYOUTS,
)

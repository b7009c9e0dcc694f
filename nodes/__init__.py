"""The pack's nodes as declarations. A family adds its file and one line here.

May import `tpu_runtime/api.py`.
"""

from . import cogvideox, flux2, hunyuan15, qwen_image, shared, wan21, wan22_i2v, z_image
from .declare import by_id

FAMILIES = (wan21, wan22_i2v, flux2, z_image, qwen_image, hunyuan15, cogvideox)
DECLARATIONS = by_id((*(node for family in FAMILIES for node in family.NODES), *shared.NODES))

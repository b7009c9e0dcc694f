"""The pack's nodes as declarations. A family adds its file and one line here.

May import `tpu_runtime/pipeline.py`.
"""

from . import cogvideox, flux2, hunyuan15, shared, wan21, wan22_i2v
from .declare import by_id

DECLARATIONS = by_id((*wan21.NODES, *wan22_i2v.NODES, *flux2.NODES, *hunyuan15.NODES, *cogvideox.NODES, *shared.NODES))

"""The pack's nodes as declarations. A family's file has the name of its folder in the runtime's models.

May import the runtime.
"""

import importlib

from ..tpu_runtime.models import FAMILY_NAMES
from . import shared
from .declare import by_id

_FAMILIES = [importlib.import_module(f".{name}", __name__) for name in FAMILY_NAMES]
DECLARATIONS = by_id((*(node for family in _FAMILIES for node in family.NODES), *shared.NODES))

"""Z-Image, text to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=(spec.BASE,), layouts=LAYOUTS, files=FILES)

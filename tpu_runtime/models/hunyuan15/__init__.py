"""HunyuanVideo 1.5, text and image to video. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import distilled, i2v, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC, i2v.SPEC), siblings=distilled.SIBLINGS, layouts=LAYOUTS, files=FILES)

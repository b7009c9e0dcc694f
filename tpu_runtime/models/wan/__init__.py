"""Wan 2.1 and 2.2, text and image to video. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import i2v, spec, ti2v
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(
    flagships=(spec.SPEC, i2v.SPEC), siblings=(*spec.SIBLINGS, *i2v.SIBLINGS, ti2v.SPEC), layouts=LAYOUTS, files=FILES
)

"""FLUX.2 dev and klein, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import klein, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=klein.SIBLINGS, layouts=LAYOUTS, files=FILES)

"""Z-Image, text to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import published_files, single_file, spec

FAMILY = Family(flagships=(spec.SPEC,), siblings=(spec.BASE,), layouts=single_file.LAYOUTS, files=published_files.FILES)

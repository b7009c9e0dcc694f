"""FLUX.2 dev and klein, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import klein, published_files, single_file, spec

FAMILY = Family(
    flagships=(spec.SPEC,), siblings=klein.SIBLINGS, layouts=single_file.LAYOUTS, files=published_files.FILES
)

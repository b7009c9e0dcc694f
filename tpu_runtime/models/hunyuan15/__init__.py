"""HunyuanVideo 1.5, text and image to video. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import distilled, i2v, published_files, single_file, spec

FAMILY = Family(
    flagships=(spec.SPEC, i2v.SPEC),
    siblings=distilled.SIBLINGS,
    layouts=single_file.LAYOUTS,
    files=published_files.FILES,
)

"""Qwen-Image and Edit, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import edit, published_files, single_file, spec

FAMILY = Family(flagships=(spec.SPEC,), siblings=(edit.SPEC,), layouts=single_file.LAYOUTS, files=published_files.FILES)

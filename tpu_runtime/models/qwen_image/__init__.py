"""Qwen-Image and Edit, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""

from ..common.family import Family
from . import edit, spec
from .published_files import FILES
from .single_file import LAYOUTS

FAMILY = Family(flagships=(spec.SPEC,), siblings=(edit.SPEC,), layouts=LAYOUTS, files=FILES)

"""PixArt-Sigma, text to image. May import `models/common` and `programs`."""

from ..common.family import Family
from . import spec

FAMILY = Family(flagships=(spec.SPEC,))

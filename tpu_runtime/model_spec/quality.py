"""Table of the qualities of a denoising step, one row each: inputs, programs, messages and help follow from the rows.

`kernels/number_formats.py` has the number formats, and `sharding/chips.py` the chips that each makes faster.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class PlainEnum(StrEnum):
    """A closed set of strings. Its members are written as plain strings, by `repr` too, which makes keys of caches."""

    __repr__ = str.__repr__


@dataclass(frozen=True, kw_only=True)
class QualityTraits:
    """The approximations of a quality, the models that support it, and its help."""

    help: str  # a clause of tooltips, which `tools/translations` translates
    number_format: str = "exact"  # of linear layers and attention scores, where that is faster
    dense: str = ""  # the same quality without sparse attention; "" if it has none
    needs: str = ""  # field that the `DenoiserSpec` of a supported model sets; "": every model supports it
    models: str = ""  # the supported ones, for messages


class Quality(PlainEnum):
    """The accuracy of a denoising step, from exact to fastest; `docs/quality.md` has the cost of each."""

    EXACT = "exact", QualityTraits(help="exact, the default, follows the model authors' code")
    INT8 = (
        "int8",
        QualityTraits(number_format="int8", help="int8 is faster, needs half the memory for weights and stays close"),
    )
    SPARSE = "int8+sparse", QualityTraits(
        number_format="int8", dense="int8", needs="tile", models="Wan, but not TI2V, and HunyuanVideo",
        help="int8+sparse (Wan, HunyuanVideo) is faster still, but gives a different video",
    )  # fmt: skip

    _value_: str
    traits: QualityTraits

    def __new__(cls, value: str, traits: QualityTraits) -> "Quality":
        member = str.__new__(cls, value)
        member._value_ = value
        member.traits = traits
        return member

    @property
    def is_sparse(self) -> bool:
        """Return whether attention leaves keys out."""
        return bool(self.traits.dense)

    @property
    def dense(self) -> str:
        """Return the same quality without sparse attention."""
        return self.traits.dense or self.value


QUALITIES = tuple(quality.value for quality in Quality)  # options of widgets and commands
COMMON_QUALITIES = tuple(quality.value for quality in Quality if not quality.traits.needs)  # of every model
APPROXIMATE = tuple(quality for quality in Quality if quality is not Quality.EXACT)


def describe_qualities(qualities: Iterable[Quality] = Quality) -> str:
    """Return the help of `qualities`, with which a tooltip ends."""
    return "; ".join(quality.traits.help for quality in qualities)

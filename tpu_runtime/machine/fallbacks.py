"""What programs do without, and the next rung down after a failure.

A compiler option that the runtime refuses is left out. A kernel that does not compile takes smaller tiles, then XLA
computes in its place. A kernel that halted a chip is left to XLA at once. The results stay exact, only slower.
"""

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ...kernels import names
from ...kernels.choice import Rungs

KERNELS_VARIABLE = "COMFYUI_TPU_KERNELS"
OPTIONS_VARIABLE = "COMFYUI_TPU_OPTIONS"
# Switches of compiler options, each with how the names of its options begin.
OPTIONS = {
    "sparsecore": ("xla_tpu_enable_sparse_core", "xla_tpu_sparse_core"),
    "async": ("xla_tpu_enable_async",),
    "vmem": ("xla_tpu_scoped_vmem",),
}
# Those that let transfers between chips run beside computation.
OVERLAP = ("sparsecore", "async")

# jax 0.10.2 and libtpu 0.0.42.1 say these.
_NO_OPTION = re.compile(r"No such compile option: '(\w+)'|into flag (\w+):")
_NO_KERNEL = re.compile(r"Mosaic failed to compile TPU kernel")
_VMEM = re.compile(r"memory space vmem|space=vmem")
# What libtpu says of a core that stopped, as quoted in public reports.
_HALT = re.compile(r"halted unexpectedly|core halt|program continuator has halted|BoundsCheck", re.IGNORECASE)
_NAMES = "|".join((*names.KERNELS, *names.PARTS))
# An instruction `%name` or `name.3`, or a call of a kernel, as XLA and as JAX write it.
_KERNEL = re.compile(rf"%({_NAMES})\b|\b({_NAMES})\.\d|\b({_NAMES})/pallas_call|pallas_call ({_NAMES})\b")

Kind = Literal["option", "kernel", "halt"]


@dataclass(frozen=True, kw_only=True)
class Fallbacks:
    """What a machine does without: see `Rungs` for `kernels`; `options` begin the names of compiler options."""

    kernels: Rungs = field(default_factory=Rungs)
    options: tuple[str, ...] = ()

    def __or__(self, other: "Fallbacks") -> "Fallbacks":
        off = _sorted(self.kernels.off, other.kernels.off)
        small = _sorted(self.kernels.small, other.kernels.small)
        return Fallbacks(kernels=Rungs(off=off, small=small), options=_sorted(self.options, other.options))

    def __bool__(self) -> bool:
        return self != Fallbacks()

    def left(self, options: Mapping[str, str]) -> dict[str, str]:
        """The compiler options that are still given."""
        return {name: value for name, value in options.items() if not name.startswith(self.options)}


class Unsupported(RuntimeError):
    """The machine did not take a part of a program: `names` are compiler options, or kernels."""

    def __init__(self, kind: Kind, program: str, names: tuple[str, ...], reason: str) -> None:
        self.kind, self.program, self.names, self.reason = kind, program, names, reason
        what = {"option": "compiler options", "kernel": "kernels", "halt": "kernels"}[kind]
        super().__init__(f"{program}: this machine does not take the {what} {', '.join(names)} ({reason}).")


class Halted(RuntimeError):
    """A core of a chip stopped: this process cannot use the chips any more. A sentence for the user."""


def from_environment(environ: Mapping[str, str] | None = None) -> Fallbacks:
    """What the owner switched off. Raises `ValueError` for a name that is none of a kernel's, or of options'."""
    environ = os.environ if environ is None else environ
    kernels = [names.SWITCHES[word] for word in _switched_off(environ, KERNELS_VARIABLE, names.SWITCHES)]
    options = prefixes(_switched_off(environ, OPTIONS_VARIABLE, OPTIONS))
    return Fallbacks(kernels=Rungs(off=_sorted(kernels)), options=options)


def prefixes(switches: Iterable[str]) -> tuple[str, ...]:
    """How the names of these switches' compiler options begin."""
    return _sorted(*(OPTIONS[switch] for switch in switches))


def _switched_off(environ: Mapping[str, str], variable: str, known: Iterable[str]) -> list[str]:
    given = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
    for word in given:
        if word[0] != "-" or word[1:] not in known:
            allowed = ", ".join(f"-{name}" for name in known)
            raise ValueError(f"{variable}: {word[:80]!r} must be one of {allowed}; separate several with commas.")
    return [word[1:] for word in given]


def explained(error: BaseException, program: str, options: Iterable[str] = ()) -> Unsupported | None:
    """What the compiler refused of `program`, compiled with these `options`, where there is a rung below; None for any
    other error.
    """
    text = str(error)
    if found := _NO_OPTION.search(text):
        return Unsupported("option", program, (found[1] or found[2],), _first_line(text))
    kernels = named(text) or _of_file(error)
    if _NO_KERNEL.search(text) or (kernels and _is_lowering(error)):
        return Unsupported("kernel", program, kernels or names.KERNELS, _first_line(text))
    if _VMEM.search(text):
        if kernels:
            return Unsupported("kernel", program, kernels, _first_line(text))
        # XLA's own operations have what the option gives them.
        if any(name.startswith(OPTIONS["vmem"]) for name in options):
            return Unsupported("option", program, OPTIONS["vmem"], _first_line(text))
    return None


def halted(error: BaseException, program: str, running: Iterable[str]) -> Unsupported | None:
    """The halt of a core that an error tells of. Its kernels: those named, else those that the program consists of."""
    text = str(error)
    if not _HALT.search(text):
        return None
    return Unsupported("halt", program, named(text) or _sorted(running), _first_line(text))


def named(text: str) -> tuple[str, ...]:
    """The kernels in an error's or a compiled program's text."""
    found: list[str] = [name for match in _KERNEL.findall(text) for name in match if name]
    return _sorted(names.PARTS.get(name, name) for name in found)


def _of_file(error: BaseException) -> tuple[str, ...]:
    """The kernel in whose file an error arose: JAX ends the error's traceback there, or its cause's."""
    causes = (error, error.__cause__)
    for frame in (frame for one in causes if one for frame in reversed(traceback.extract_tb(one.__traceback__))):
        path = PurePath(frame.filename)
        if path.parent.name == "kernels":
            # `attention_body.py` is the attention's, and `attention_int8.py` that of the longer name.
            found = [word for word in names.SWITCHES if f"{path.stem}_".startswith(f"{word}_")]
            return (names.SWITCHES[max(found, key=len)],) if found else ()
    return ()


def _is_lowering(error: BaseException) -> bool:
    """Whether JAX refused to translate a kernel; any other error in a kernel's file is a fault of its code."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return any("/jax/_src/pallas/mosaic/" in frame.filename for frame in innermost)


def below(fallbacks: Fallbacks, failure: Unsupported) -> tuple[Fallbacks, str] | None:
    """What the next rung leaves out beside `fallbacks`, and a sentence that says what runs in its place; None where
    there is none.
    """
    small = tuple(name for name in failure.names if name not in fallbacks.kernels.small)
    if failure.kind == "option":
        more = Fallbacks(options=_sorted(failure.names))
        how = "is compiled without, and may be slower"
    elif failure.kind == "kernel" and small:
        more = Fallbacks(kernels=Rungs(small=_sorted(small)))
        how = "takes smaller tiles"
    else:
        more = Fallbacks(kernels=Rungs(off=_sorted(failure.names)))
        how = "is computed by XLA in its place, more slowly"
    if fallbacks | more == fallbacks:
        return None
    verb = {"option": "does not know", "kernel": "does not compile", "halt": "was halted by"}[failure.kind]
    what = ", ".join(failure.names)
    return more, f"This machine {verb} {what} ({failure.reason}): {failure.program} {how}."


def _sorted(*groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for group in groups for name in group}))


def _first_line(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    line = f"{first} {rest.partition(chr(10))[0]}" if first.endswith(":") else first
    return line if len(line) <= 200 else f"{line[:200]}…"


# Without transfers beside computation.
WITHOUT_OVERLAP = Fallbacks(options=prefixes(OVERLAP))

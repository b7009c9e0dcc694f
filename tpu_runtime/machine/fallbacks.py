"""Fallbacks of programs, and the next one after a failure.

A compiler option that the runtime rejects is omitted. A kernel that does not compile gets smaller tiles, then XLA
replaces it. A kernel that halted a chip is replaced by XLA at once. Results stay exact, only slower.
"""

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ...kernels import registry
from ...kernels.dispatch import KernelFallbacks
from ..messages import compose

KERNELS_VARIABLE = "COMFYUI_TPU_KERNELS"
OPTIONS_VARIABLE = "COMFYUI_TPU_OPTIONS"
# Switches of compiler options, each with the prefixes of its options' names.
OPTIONS = {
    "sparsecore": ("xla_tpu_enable_sparse_core", "xla_tpu_sparse_core"),
    "async": ("xla_tpu_enable_async",),
    "vmem": ("xla_tpu_scoped_vmem",),
}
# The switches of options that overlap transfers between chips with computation.
OVERLAP = ("sparsecore", "async")

# Messages of jax 0.10.2 and libtpu 0.0.42.1.
_NO_OPTION = re.compile(r"No such compile option: '(\w+)'|into flag (\w+):")
_NO_KERNEL = re.compile(r"Mosaic failed to compile TPU kernel")
_VMEM = re.compile(r"memory space vmem|space=vmem")
# libtpu's messages about a halted core, as quoted in public reports.
_HALT = re.compile(r"halted unexpectedly|core halt|program continuator has halted|BoundsCheck", re.IGNORECASE)
_NAMES = "|".join((*registry.KERNELS, *registry.HELPER_KERNELS))
# An instruction `%name` or `name.3`, or a call of a kernel, as XLA and as JAX write it.
_KERNEL = re.compile(rf"%({_NAMES})\b|\b({_NAMES})\.\d|\b({_NAMES})/pallas_call|pallas_call ({_NAMES})\b")

Kind = Literal["option", "kernel", "halt"]


@dataclass(frozen=True, kw_only=True)
class Fallbacks:
    """Kernels and compiler options that a machine does without."""

    kernels: KernelFallbacks = field(default_factory=KernelFallbacks)
    options: tuple[str, ...] = ()  # prefixes of the names of compiler options

    def __or__(self, other: "Fallbacks") -> "Fallbacks":
        off = _sort_unique(self.kernels.off, other.kernels.off)
        small = _sort_unique(self.kernels.small, other.kernels.small)
        return Fallbacks(
            kernels=KernelFallbacks(off=off, small=small), options=_sort_unique(self.options, other.options)
        )

    def __bool__(self) -> bool:
        return self != Fallbacks()

    def left(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return the compiler options that remain."""
        return {name: value for name, value in options.items() if not name.startswith(self.options)}


class Unsupported(RuntimeError):
    """A part of a program failed on this machine.

    kind: of the failure. program: its name. names: compiler options, or kernels. reason: first line of the error.
    """

    def __init__(self, kind: Kind, program: str, names: tuple[str, ...], reason: str) -> None:
        self.kind, self.program, self.names, self.reason = kind, program, names, reason
        what = {"option": "compiler options", "kernel": "kernels", "halt": "kernels"}[kind]
        super().__init__(
            compose("machine.unsupported", program=program, what=what, names=", ".join(names), reason=reason)
        )


class ChipHalted(RuntimeError):
    """A core of a chip halted: this process cannot use the chips any more. The message is a sentence for the user."""


def fallbacks_from_environment(environ: Mapping[str, str] | None = None) -> Fallbacks:
    """Return the fallbacks that the owner switched on. Raises ValueError for an unknown kernel or option."""
    environ = os.environ if environ is None else environ
    kernels = [registry.SWITCHES[word] for word in _parse_switches(environ, KERNELS_VARIABLE, registry.SWITCHES)]
    options = option_prefixes(_parse_switches(environ, OPTIONS_VARIABLE, OPTIONS))
    return Fallbacks(kernels=KernelFallbacks(off=_sort_unique(kernels)), options=options)


def option_prefixes(switches: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of these switches' compiler options."""
    return _sort_unique(*(OPTIONS[switch] for switch in switches))


def _parse_switches(environ: Mapping[str, str], variable: str, known: Iterable[str]) -> list[str]:
    words = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
    for word in words:
        if word[0] != "-" or word[1:] not in known:
            allowed = ", ".join(f"-{name}" for name in known)
            raise ValueError(
                compose("machine.switch_unknown", variable=variable, word=repr(word[:80]), allowed=allowed)
            )
    return [word[1:] for word in words]


def classify_compile_error(error: BaseException, program: str, options: Iterable[str] = ()) -> Unsupported | None:
    """Return the part of `program` that the compiler rejected if there is a fallback for it, or None for other errors.

    error: raised by the compiler. options: names of the compiler options used.
    """
    text = str(error)
    if match := _NO_OPTION.search(text):
        return Unsupported("option", program, (match[1] or match[2],), _first_line(text))
    kernels = find_kernels(text) or _kernel_of_traceback(error)
    if _NO_KERNEL.search(text) or (kernels and _is_lowering(error)):
        return Unsupported("kernel", program, kernels or registry.KERNELS, _first_line(text))
    if _VMEM.search(text):
        if kernels:
            return Unsupported("kernel", program, kernels, _first_line(text))
        # The VMEM of XLA's own operations is set by the option.
        if any(name.startswith(OPTIONS["vmem"]) for name in options):
            return Unsupported("option", program, OPTIONS["vmem"], _first_line(text))
    return None


def classify_halt(error: BaseException, program: str, running: Iterable[str]) -> Unsupported | None:
    """Return the halt of a core that an error reports, or None.

    error: raised by the runtime. program: its name. running: the program's kernels, used if the error names no kernel.
    """
    text = str(error)
    if not _HALT.search(text):
        return None
    return Unsupported("halt", program, find_kernels(text) or _sort_unique(running), _first_line(text))


def find_kernels(text: str) -> tuple[str, ...]:
    """Return the kernels named in the text of an error or of a compiled program."""
    matches: list[str] = [name for match in _KERNEL.findall(text) for name in match if name]
    return _sort_unique(registry.HELPER_KERNELS.get(name, name) for name in matches)


def _kernel_of_traceback(error: BaseException) -> tuple[str, ...]:
    """Return the kernel in whose file an error, or its cause, was raised, from the traceback's innermost frames."""
    causes = (error, error.__cause__)
    for frame in (frame for cause in causes if cause for frame in reversed(traceback.extract_tb(cause.__traceback__))):
        path = PurePath(frame.filename)
        if path.parent.name == "kernels":
            # `attention_body.py` belongs to attention, `attention_int8.py` to the kernel with the longer name.
            words = [word for word in registry.SWITCHES if f"{path.stem}_".startswith(f"{word}_")]
            return (registry.SWITCHES[max(words, key=len)],) if words else ()
    return ()


def _is_lowering(error: BaseException) -> bool:
    """Return whether JAX could not lower a kernel; any other error in a kernel's file is a bug in its code."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return any("/jax/_src/pallas/mosaic/" in frame.filename for frame in innermost)


def next_fallback(fallbacks: Fallbacks, failure: Unsupported) -> tuple[Fallbacks, str] | None:
    """Return the next fallback after a failure and a sentence for the user, or None after the last one.

    fallbacks: those in use already. failure: of a program.
    """
    small = tuple(name for name in failure.names if name not in fallbacks.kernels.small)
    if failure.kind == "option":
        more = Fallbacks(options=_sort_unique(failure.names))
        how = "is compiled without it, and may be slower"
    elif failure.kind == "kernel" and small:
        more = Fallbacks(kernels=KernelFallbacks(small=_sort_unique(small)))
        how = "uses smaller tiles"
    else:
        more = Fallbacks(kernels=KernelFallbacks(off=_sort_unique(failure.names)))
        how = "uses XLA instead, more slowly"
    if fallbacks | more == fallbacks:
        return None
    problem = {"option": "is unknown", "kernel": "does not compile", "halt": "halted the chips"}[failure.kind]
    what = ", ".join(failure.names)
    return more, compose(
        "machine.fallback", what=what, problem=problem, reason=failure.reason, program=failure.program, how=how
    )


def _sort_unique(*groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for group in groups for name in group}))


def _first_line(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    line = f"{first} {rest.partition(chr(10))[0]}" if first.endswith(":") else first
    return line if len(line) <= 200 else f"{line[:200]}…"


# Without overlapped transfers.
WITHOUT_OVERLAP = Fallbacks(options=option_prefixes(OVERLAP))

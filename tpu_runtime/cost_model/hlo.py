"""Parser of the scheduled program that XLA prints (`jax.stages.Compiled.as_text()`), as far as predictions need it.

Instructions keep the schedule's order. Written for libtpu 0.0.42.1, whose instructions may span lines.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..messages import compose

BYTES = {"pred": 1, "token": 0} | {
    f"{kind}{bits}": max(1, bits // 8) for kind in ("s", "u", "f", "bf", "c") for bits in (2, 4, 8, 16, 32, 64, 128)
}
_ARRAY = re.compile(r"\b(pred|token|[sucf]\d+|bf16|f8e\w+)\[([\d,]*)\]")
_STARTS = re.compile(r"  (?:ROOT )?%")
_NAMES = re.compile(r"%([^\s,(){}]+)")
_CLOSE = {"(": ")", "{": "}"}


@dataclass(frozen=True, kw_only=True)
class Array:
    """Shape and dtype of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.dims) * (1 if self.dtype.startswith("f8") else BYTES[self.dtype])

    @property
    def is_score(self) -> bool:
        """Return whether it may hold float32 attention scores: two dimensions are long."""
        return self.dtype == "f32" and sum(dim >= 256 for dim in self.dims) >= 2

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape text; for a tuple all of them, nested or not."""
    return tuple(
        Array(dtype=dtype, dims=tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(shape)
    )


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of instructions and computations in `text`."""
    return tuple(_NAMES.findall(text))


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Instruction `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names
    operand_text: str  # all operands: a constant or a parameter's number is not a name
    attributes: str = field(repr=False)
    is_root: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        return parse_arrays(self.shape)

    @property
    def size_bytes(self) -> int:
        return sum(array.size_bytes for array in self.arrays)

    def find_attribute(self, name: str) -> str | None:
        """Return an attribute: `{...}`, a quoted string, each with its delimiters, or a bare word; None if missing."""
        match = re.search(rf"(?:^|[ ,]){name}=", self.attributes)
        if not match:
            return None
        rest = self.attributes[match.end() :]
        if rest[0] in _CLOSE:
            return rest[: _find_close(rest)]
        bare = re.match(r'"[^"]*"|[^\s,]*', rest)
        assert bare  # an empty one at least
        return bare.group()

    def require_attribute(self, name: str) -> str:
        """Return an attribute that every instruction of this opcode has."""
        value = self.find_attribute(name)
        assert value is not None, f"{self.name} has no {name}"
        return value

    def computation(self, name: str) -> str:
        """Return the name of the computation that attribute `name` refers to."""
        return self.require_attribute(name).removeprefix("%")

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """Return the compiler's own estimate for one execution; None if it has none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else None

    @property
    def backend_config(self) -> Mapping[str, Any]:
        return json.loads(self.find_attribute("backend_config") or "{}")

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)


@dataclass(frozen=True, kw_only=True)
class Module:
    """Scheduled program."""

    computations: Mapping[str, Computation]  # by name
    entry: str  # name of the computation that runs first
    frames: Mapping[int, tuple[str, int, int]]  # number -> file, line, number of the caller's frame

    def source(self, instruction: Instruction) -> str:
        """Return `file:line` of the innermost frame of the instruction that is not in a library."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        number = int(match.group(1)) if match else 0
        innermost = ""
        while number in self.frames:
            file, line, number = self.frames[number]
            place = f"{_short(file)}:{line}"
            innermost = innermost or place
            if not re.search(r"/site-packages/(jax|torchax|torch|numpy)/", file):
                return place
        return innermost


def _short(file: str) -> str:
    """Return the path within an installed package or within this one."""
    ours = str(Path(__file__).parents[2]) + "/"
    return file.removeprefix(ours).rpartition("/site-packages/")[2]


def parse_module(text: str) -> Module:
    """Return the scheduled module. Raises `ValueError` if `text` is not one."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(compose("plan.hlo_not_scheduled"))
    computations: dict[str, Computation] = {}
    entry = header = ""
    lines: list[str] = []
    for line in text.split("\n"):
        if not header:
            match = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
            if match:
                header, lines = match.group(2), []
                entry = header if match.group(1) else entry
        elif line == "}" or line.startswith("}, execution_thread"):
            computations[header] = Computation(name=header, instructions=tuple(map(_instruction, lines)))
            header = ""
        elif _STARTS.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += "\n" + line
    return Module(computations=computations, entry=entry, frames=_frames(text))


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    shape_end = _find_close(right) if right[0] == "(" else right.index(" ")
    opcode, _, rest = right[shape_end:].strip().partition("(")
    rest = "(" + rest
    operands_end = _find_close(rest)
    operand_text = rest[1 : operands_end - 1]
    return Instruction(
        name=left.removeprefix("ROOT ").removeprefix("%"),
        shape=right[:shape_end],
        opcode=opcode,
        operands=parse_names(operand_text),
        operand_text=operand_text,
        attributes=rest[operands_end:].removeprefix(", "),
        is_root=left.startswith("ROOT "),
    )


def _find_close(text: str) -> int:
    """Return the end, exclusive, of the bracket that opens `text`. Brackets within quotes do not count."""
    opening, closing = text[0], _CLOSE[text[0]]
    depth = position = 0
    for match in re.finditer(rf'"(?:[^"\\]|\\.)*"|[{re.escape(opening + closing)}]', text):
        depth += {opening: 1, closing: -1}.get(match.group(), 0)
        position = match.end()
        if depth == 0:
            return position
    raise ValueError(f"unbalanced brackets in HLO: {text[:200]}")


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
    """Return stack frames by number, from the tables `FileNames`, `FileLocations` and `StackFrames`."""
    tables: dict[str, dict[int, str]] = {}
    title = ""
    for line in text[: max(text.find("\n%"), 0)].split("\n"):
        if re.fullmatch(r"[A-Z]\w+", line):
            title = line
            tables[title] = {}
        elif title and (match := re.match(r"(\d+) (.*)", line)):
            tables[title][int(match.group(1))] = match.group(2)
    frames = {}
    for number, row in tables.get("StackFrames", {}).items():
        frame = _numbers(row)
        location = _numbers(tables["FileLocations"][frame["file_location_id"]])
        file = tables["FileNames"][location["file_name_id"]].strip('"')
        # The caller's number is written plus one; 1 means no caller.
        frames[number] = (file, location["line"], frame.get("parent_frame_id", 1) - 1)
    return frames


def _numbers(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}

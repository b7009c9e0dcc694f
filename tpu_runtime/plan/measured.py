"""What `comfyui-tpu bench` measured on a machine with a TPU: the record, as JSON that is checked when it is read."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class MeasuredProgram:
    """Seconds of one program: of the compiler, and of `runs` in one generation each; predicted, where that was asked.

    `peak_bytes`: what the compiler says that a device holds while it runs.
    """

    name: str
    runs: int
    mesh: str
    compile_s: float
    median_s: float
    least_s: float
    most_s: float
    predicted_s: float | None
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model's programs on one machine. No paths, no names of machines. Of the fullest device `hbm_peak_bytes` were in
    use, `hbm_reserved_peak_bytes` reserved for programs beside them, of `hbm_limit_bytes`; None where devices do not
    say it. `is_tiny`: of the miniature, which shows that it runs, not how fast.
    """

    model: str
    title: str
    settings: Mapping[str, Any]
    device_kind: str
    num_devices: int
    precision: str
    versions: Mapping[str, str]
    is_tiny: bool
    hbm_peak_bytes: int | None
    programs: tuple[MeasuredProgram, ...]
    hbm_reserved_peak_bytes: int | None = None
    hbm_limit_bytes: int | None = None

    @property
    def total_s(self) -> float:
        """Of one generation's programs, without loading and host work."""
        return sum(program.median_s * program.runs for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "label": "measured", **asdict(self), "total_s": self.total_s}


def read(path: Path) -> Measured:
    """Raises `ValueError` with a sentence for a file that is no such record."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not what `comfyui-tpu bench --json` of this version writes (schema {SCHEMA}).")
    programs = tuple(_fill(MeasuredProgram, program, path) for program in record.get("programs", ()))
    if not programs:
        raise ValueError(f"{path} holds no program; `programs` must have one for each that ran.")
    return _fill(Measured, {**record, "programs": programs}, path)


def _fill(kind: type, values: Any, path: Path) -> Any:
    """A record of `kind`; ValueError that names the fields that are missing or of a wrong type. Those with a default
    came later: older records do not have them.
    """
    defaults = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    values = {**defaults, **values} if isinstance(values, dict) else {}
    wrong = [one.name for one in fields(kind) if one.name not in values or not _fits(one.type, values[one.name])]
    if wrong:
        raise ValueError(f"{path}: {', '.join(wrong)} of a {kind.__name__} {'is' if len(wrong) == 1 else 'are'} wrong.")
    return kind(**{one.name: values[one.name] for one in fields(kind)})


def _fits(kind: Any, value: Any) -> bool:
    if value is None:
        return "None" in str(kind)
    wanted = {int: int, float: (int, float), str: str, bool: bool}.get(kind)
    return wanted is None or (isinstance(value, wanted) and isinstance(value, bool) == (kind is bool))

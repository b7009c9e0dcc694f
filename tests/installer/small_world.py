"""A network in a folder: repositories in place of ComfyUI's, and for every package a wheel with next to
nothing in it, so that git, venv and pip do what they do elsewhere, in seconds.
"""

import importlib.metadata
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import comfyui_tpu
from comfyui_tpu.installer import layout
from packaging.requirements import Requirement

ROOT = Path(comfyui_tpu.__file__).resolve().parent
# Prints what it was started with, in place of a server, and with HOLD runs until its input ends.
MAIN = """import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]), flush=True)
"HOLD" in os.environ and sys.stdin.read()
"""
COMFYUI = {
    "main.py": MAIN,
    "comfyui_version.py": '__version__ = "0.33.0"\n',
    "manager_requirements.txt": "comfyui_manager==4.2.2\n",
    "requirements.txt": "torch\ntorchvision\ntorchaudio\neinops # shapes\n\n#more:\ntransformers>=4.50.3\n",
    "models/checkpoints/put_checkpoints_here": "",
    "custom_nodes/example_node.py.example": "",
    ".gitignore": "__pycache__/\n/custom_nodes/\n/input/\n/models/\n",
}


def repository(folder: Path, files: dict[str, str], tag: str) -> Path:
    """A git repository with `files` as its one commit, which bears `tag`."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "master")
    commit(folder, files, tag)
    return folder


def commit(folder: Path, files: dict[str, str], tag: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A", "-f")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", tag)
    git(folder, "tag", tag)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def wheel(
    folder: Path, name: str, version: str, requires: Sequence[str] = (), files: dict[str, str] | None = None
) -> None:
    module = name.lower().replace("-", "_")
    files = files or {f"{module}/__init__.py": ""}
    metadata = "".join(f"Requires-Dist: {each}\n" for each in requires)
    info = f"{module}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: tpu\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)


def wheel_of_installed(folder: Path, name: str) -> None:
    """The installed package again, as the wheel that it came from."""
    found = importlib.metadata.distribution(name)
    target = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path in found.files or ():
            if ".." not in path.parts and path.suffix != ".pyc" and path.locate().is_file():
                archive.write(str(path.locate()), str(path))


def wheels(folder: Path) -> Path:
    """All that the pack and the small ComfyUI and Manager need."""
    folder.mkdir()
    constraints = layout.layout(None).venv.constraints
    pins = [line for line in constraints.read_text().splitlines() if "==" in line and line[0] != "#"]
    version_of = {Requirement(pin).name: pin.partition("==")[2].replace("*", "0") for pin in pins}
    texts = [(ROOT / name).read_text() for name in ("requirements.txt", "supported.txt")]
    own = [line for text in texts for line in text.splitlines() if line and line[0] != "#"]
    for name in ("setuptools", "packaging"):  # these two are put to use
        wheel_of_installed(folder, name)
    for each in (one for one in map(Requirement, own) if one.name not in ("packaging", "torch")):
        lowest = next((one.version for one in each.specifier if one.operator == ">="), "1.0")
        requires = ['libtpu==0.0.42.1; extra == "tpu"'] if each.name == "jax" else ()
        wheel(folder, each.name, version_of.get(each.name, lowest), requires)
    wheel(folder, "libtpu", version_of["libtpu"])
    wheel(folder, "einops", "0.8")
    wheel(folder, "comfyui-manager", "4.2.2", requires=["GitPython", "uv"])
    wheel(folder, "uv", version_of["uv"], files={"uv/__init__.py": ""})
    wheel(folder, "GitPython", "3.1", requires=["gitdb"])
    wheel(folder, "gitdb", "4.0")
    torch(folder, "2.13.0+cpu", cuda=None)
    wheel(folder, "torchvision", "0.28.0+cpu", requires=["torch==2.13.0"])
    wheel(folder, "torchaudio", "2.11.0+cpu")
    return folder


def torch(folder: Path, version: str, *, cuda: str | None) -> None:
    requires = ["nvidia-cublas"] if cuda else ()
    files = {"torch/__init__.py": "", "torch/version.py": f"cuda = {cuda!r}\n"}
    wheel(folder, "torch", version, requires, files)


def listing(*folders: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its size and time of change, but for what Python compiles by itself."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if "__pycache__" not in path.parts:
            status = path.lstat()
            found[str(path)] = (status.st_size, 0 if path.is_dir() else status.st_mtime_ns)
    return found

"""The steps of an installation. Each checks the current state, so it can be repeated and resumed."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import git
from .layout import COMFYUI_ORIGIN, COMFYUI_TAG, Installation, Record, is_remainder, require_comfyui, write_record
from .machine import ROOT, has_tpu
from .terminal import SetupError, say
from .venv import CPU_INDEX, cuda_traces, install_this_folder, requirement_lines

TORCH = ("torch", "torchvision", "torchaudio")


@dataclass(frozen=True, kw_only=True)
class SetupStep:
    """One step of an installation."""

    name: str
    todo: Callable[[], str]  # returns what would be done; "" if it is done
    do: Callable[[], None]  # does it, completely or not at all
    size_gb: float = 0  # on the disk


def steps(layout: Installation) -> list[SetupStep]:
    """Return all steps in order."""
    every = (_comfyui, _environment, _torch, _constraints, _packages, _command, _link)
    return [step(layout) for step in every]


# --- clones -----------------------------------------------------------------------------------------------------------


def _comfyui(layout: Installation) -> SetupStep:
    target, origin = layout.comfyui, layout.comfyui_origin

    def todo() -> str:
        return "" if (target / "main.py").is_file() else f"clone {origin} at {COMFYUI_TAG} into {target}"

    def do() -> None:
        beginning = target.with_name(f".{target.name}.beginning")
        home = layout.home if is_remainder(target) else Installation(beginning).home

        def ready(commit: str) -> None:
            require_comfyui(beginning)
            write_record(home, Record(comfyui=commit))

        if git.find_commit(target) is None:
            git.clone(origin, COMFYUI_TAG, target, beginning, default_branch=origin != COMFYUI_ORIGIN, ready=ready)
        git.write_missing_files(target)

    return SetupStep(name="ComfyUI", todo=todo, do=do, size_gb=0.3)


# --- the environment --------------------------------------------------------------------------------------------------


def _environment(layout: Installation) -> SetupStep:
    venv = layout.venv

    def todo() -> str:
        if venv.is_usable(any_python=True):
            return ""
        return f"{'recreate' if venv.folder.exists() else 'create'} the environment {venv.folder}"

    return SetupStep(name="environment", todo=todo, do=lambda: venv.make(any_python=True), size_gb=0.1)


def _torch(layout: Installation) -> SetupStep:
    venv = layout.venv

    def todo() -> str:
        versions = venv.versions()
        pins = venv.pins(TORCH)
        have = [_satisfies(versions.get(name, ""), pin) for name, pin in zip(TORCH, pins, strict=True)]
        if all(have) and not cuda_traces(venv.python, venv.environment()):
            return ""
        return f"install {', '.join(pins)} from {CPU_INDEX}, the builds for the CPU"

    def do() -> None:
        venv.forget_half_installed()
        venv.install_torch(TORCH)

    return SetupStep(name="PyTorch", todo=todo, do=do, size_gb=1.0)


def _satisfies(version: str, pin: str) -> bool:
    """Return whether `version`, which may have a local part, matches a pin such as "torch==2.13.0" or "x==0.28.*"."""
    pinned_version, public = pin.partition("==")[2], version.partition("+")[0]
    return (
        public.startswith(pinned_version.removesuffix("*"))
        if pinned_version.endswith("*")
        else public == pinned_version
    )


def _constraints(layout: Installation) -> SetupStep:
    def todo() -> str:
        if layout.constraints.is_file() and layout.constraints.read_text() == build_constraints(layout):
            return ""
        return f"write {layout.constraints}: no later installation, Manager's included, replaces these builds"

    def do() -> None:
        beginning = layout.constraints.with_suffix(".new")
        beginning.write_text(build_constraints(layout))
        beginning.replace(layout.constraints)

    return SetupStep(name="constraints", todo=todo, do=do)


def build_constraints(layout: Installation) -> str:
    """Return the constraints for later installations: PyTorch's installed builds, and the pack's version ranges."""
    versions = layout.venv.versions()
    # With its local part, such as 2.13.0+cpu, a version allows only that build.
    torch = [f"{name}=={versions[name]}" for name in TORCH if name in versions]
    ranges = requirement_lines(_read_requirements().replace("jax[tpu]", "jax"))  # constraints do not support extras
    lines = [line for line in ranges if any(sign in line.split(";")[0] for sign in "<>=")]
    return "\n".join(["# Written by ComfyUI-TPU's setup.py, which hands it to pip and uv.", *torch, *lines, ""])


def _packages(layout: Installation) -> SetupStep:
    venv = layout.venv

    def todo() -> str:
        missing = find_unmet_requirements(layout)
        if missing is None:
            return "install what ComfyUI, Manager and this pack need"
        some = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        return f"install {some}" if missing else ""

    def do() -> None:
        venv.forget_half_installed()
        requirements = layout.home / "requirements.txt"
        requirements.write_text(_own_requirements())
        files = [word for file in (*_foreign_requirements(layout), requirements) for word in ("-r", str(file))]
        arguments = ("-c", str(layout.constraints), *files)
        # A newer ComfyUI may need other versions than those tested together; the ranges still apply.
        tested, within_ranges = venv.constrained_command(*arguments), venv.install_command(*arguments)
        venv.install("installing what ComfyUI, Manager and this pack need", tested, within_ranges)
        venv.require_cpu_build()

    # jaxlib is the largest package: once it is installed, little is missing.
    return SetupStep(name="packages", todo=todo, do=do, size_gb=0.3 if "jaxlib" in venv.versions() else 3.0)


def _read_requirements() -> str:
    """Return requirements.txt, and the version ranges of the packages that it only names."""
    return "\n".join((ROOT / name).read_text() for name in ("requirements.txt", "supported.txt"))


def _own_requirements() -> str:
    """Return the requirements for this machine: without a TPU without libtpu."""
    text = _read_requirements()
    return text if has_tpu() else text.replace("jax[tpu]", "jax")


def _foreign_requirements(layout: Installation) -> list[Path]:
    files = (layout.comfyui / "requirements.txt", layout.manager_requirements)
    return [file for file in files if file.is_file()]


# Includes transitive requirements: an interrupted installation may lack only those.
_UNMET = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
given = json.load(sys.stdin)
wanted, unmet, seen = [(line, "") for line in given["wanted"]], {}, set()
while wanted:
    line, extra = wanted.pop()
    each = Requirement(line)
    if (line, extra) in seen or each.marker and not each.marker.evaluate({"extra": extra}):
        continue
    seen.add((line, extra))
    version = given["installed"].get(canonicalize_name(each.name))
    if version is None or not each.specifier.contains(version, prereleases=True):
        unmet.setdefault(canonicalize_name(each.name), line.partition(";")[0].strip())
        continue
    wanted += [(other, one) for one in ("", *each.extras) for other in importlib.metadata.requires(each.name) or ()]
print("\\n".join(unmet[name] for name in sorted(unmet)), end="")
"""


def find_unmet_requirements(layout: Installation) -> list[str] | None:
    """Return the unmet requirements of the environment, transitive ones included; None if they cannot be determined."""
    venv = layout.venv
    if not Path(venv.python).exists():
        return None
    texts = [file.read_text("utf-8") for file in _foreign_requirements(layout)] + [_own_requirements()]
    packages = {"installed": venv.versions(), "wanted": [line for text in texts for line in requirement_lines(text)]}
    command = [venv.python, "-c", _UNMET]
    done = subprocess.run(command, env=venv.environment(), input=json.dumps(packages), capture_output=True, text=True)
    return None if done.returncode else done.stdout.splitlines()


def _command(layout: Installation) -> SetupStep:
    venv = layout.venv

    def todo() -> str:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        is_there = Path(venv.program("comfyui-tpu")).is_file() and venv.versions().get("comfyui-tpu") == version
        return (
            ""
            if is_there and _find_linked_folder(layout) == ROOT.as_uri()
            else f"install {venv.program('comfyui-tpu')}"
        )

    def do() -> None:
        venv.forget_half_installed()
        install_this_folder(venv)
        venv.require_cpu_build()

    return SetupStep(name="command", todo=todo, do=do)


def _find_linked_folder(layout: Installation) -> str | None:
    """Return the URL of the folder that the environment uses for this pack."""
    for site in layout.venv.site_packages():
        for file in site.glob("comfyui_tpu-*.dist-info/direct_url.json"):
            return json.loads(file.read_text()).get("url")
    return None


# --- the link ------------------------------------------------------------------------------------------------------


def _link(layout: Installation) -> SetupStep:
    link = layout.link

    def todo() -> str:
        return "" if layout.is_in_custom_nodes or link.resolve() == ROOT else f"link {link} to {ROOT}"

    def do() -> None:
        if link.is_symlink() and layout.record().link:
            link.unlink()  # our link to the repository's earlier place
        layout.note(link=True)
        link.symlink_to(ROOT, target_is_directory=True)

    return SetupStep(name="link", todo=todo, do=do)


# --- all of them ------------------------------------------------------------------------------------------------------


def refuse_other_copies(layout: Installation) -> None:
    """Raise SetupError if ComfyUI would also load the pack from another folder."""
    if layout.link.is_symlink() and layout.link.resolve() != ROOT and not layout.record().link:
        raise SetupError(
            f"{layout.link} is a link to {layout.link.resolve()}, not to this folder: remove it, or run that folder's "
            "setup.py."
        )
    for file in layout.custom_nodes.glob("*/pyproject.toml"):
        if (
            file.parent.resolve() != ROOT
            and not file.parent.is_symlink()
            and b'name = "comfyui-tpu"' in file.read_bytes()  # the file may have any encoding
        ):
            raise SetupError(
                f"{file.parent} is another copy of this pack, and ComfyUI would load both: remove it, or run its "
                "setup.py."
            )
    if layout.link.exists() and not layout.link.is_symlink() and layout.link.resolve() != ROOT:
        raise SetupError(f"{layout.link} is in the way of the link to this folder: move it away, then run this again.")


def run(layout: Installation, chosen: list[SetupStep]) -> None:
    """Do the steps in `chosen` that are not done; each checks again, because an earlier one may have done its work."""
    for step in chosen:
        if not (text := step.todo()):
            continue
        say(f"{step.name}: {text}")
        if layout.comfyui.is_dir() and any(layout.comfyui.iterdir()):
            layout.note()  # from here on the folder has files of ours
            layout.temporary.mkdir(exist_ok=True)
        try:
            step.do()
        finally:
            if layout.home.is_dir():
                shutil.rmtree(layout.temporary, ignore_errors=True)
    forget_downloads(layout)


def forget_downloads(layout: Installation) -> None:
    """Remove a gigabyte of wheels that are installed now."""
    shutil.rmtree(layout.home / "cache", ignore_errors=True)

"""`setup.py install`: ComfyUI, Manager and this pack in one folder, with an environment of its own."""

import argparse
import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import steps
from .layout import COMFYUI_ORIGIN, COMFYUI_TAG, Installation, is_remainder, layout, require_comfyui
from .lock import lock_exclusively
from .machine import ROOT
from .steps import SetupStep
from .terminal import SetupError, confirm, say

_DESCRIPTION = f"""\
Installs ComfyUI {COMFYUI_TAG}, the Manager that it requires, and this pack, with PyTorch's build for the CPU. On a
TPU VM it also installs jax[tpu]. An existing ComfyUI and its environment are left unchanged: packages go into
DIR/.comfyui-tpu/venv. Nothing is written outside DIR and the folder of this file. Finished steps are skipped: the
same command resumes after an interruption, and changes nothing if everything is done.\
"""


def main(arguments: Sequence[str]) -> int:
    """Installs ComfyUI, Manager and this pack, on a TPU VM or elsewhere (needs the network)"""
    parser = verb("install", _DESCRIPTION)
    parser.add_argument("--comfyui-origin", metavar="URL", default=COMFYUI_ORIGIN, help="clone ComfyUI from here")
    options = parser.parse_args(arguments)
    return install(replace(layout(options.comfyui), comfyui_origin=options.comfyui_origin), options)


def verb(name: str, description: str, *, changes: bool = True) -> argparse.ArgumentParser:
    """Return the parser of install, update, uninstall and start.

    name: of the verb. description: its help. changes: whether it has the options --yes and --dry-run.
    """
    parser = argparse.ArgumentParser(prog=f"setup.py {name}", description=description)
    parser.add_argument("--comfyui", metavar="DIR", help="ComfyUI's folder (default: COMFYUI_PATH, else ~/ComfyUI)")
    if changes:
        parser.add_argument("--yes", action="store_true", help="do not ask before changing anything")
        parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    return parser


def install(chosen: Installation, options: argparse.Namespace, *, before: Sequence[SetupStep] = ()) -> int:
    """Run the steps in `before` and all others that are not done yet, after a question; return exit code 0.

    chosen: the installation. options: of the command.
    """
    # A ComfyUI of ours that is too old, or was partly removed, will be completed.
    _refuse(chosen, is_updated=chosen.record().comfyui is not None)
    with contextlib.nullcontext() if options.dry_run else lock_exclusively(chosen):
        _carry_out(chosen, [*before, *steps.steps(chosen)], options)
    if not options.dry_run:
        _report(chosen)
    return 0


def _refuse(chosen: Installation, *, is_updated: bool) -> None:
    """Raise SetupError if an installation could not succeed, before anything is changed."""
    if shutil.which("git") is None:
        raise SetupError("git is needed to clone ComfyUI, and is not installed: sudo apt install git")
    if chosen.comfyui.is_dir() and any(chosen.comfyui.iterdir()):
        if not is_updated and not is_remainder(chosen.comfyui):
            require_comfyui(chosen.comfyui)
        steps.refuse_other_copies(chosen)
    elif chosen.comfyui.exists() and not chosen.comfyui.is_dir():
        raise SetupError(f"{chosen.comfyui} is a file: choose a folder with --comfyui DIR.")


def _carry_out(chosen: Installation, every: list[SetupStep], options: argparse.Namespace) -> None:
    """Print what each step would do, ask, and do it."""
    left = [(step, text) for step in every if (text := step.todo())]
    if not left:
        if not options.dry_run:
            steps.forget_downloads(chosen)  # of a run that was interrupted after its last step
        say(f"{chosen.comfyui}: everything is in place")
        return
    ahead = {step.name for step, _ in left}
    done = dict.fromkeys(step.name for step in every if step.name not in ahead)
    where = f"In {chosen.comfyui}" + (f" (already there: {', '.join(done)})" if done else "")
    size_gb = sum(step.size_gb for step, _ in left)
    print(f"{where}, this will be done:\n\n" + "\n".join(f"  {step.name:<12} {text}" for step, text in left))
    print(f"\nThis takes about {size_gb:.1f} GB." if size_gb else "", flush=True)
    _require_room(chosen.comfyui, size_gb)
    if options.dry_run:
        return
    if not options.yes:
        confirm("Go on?")
    steps.run(chosen, every)


def _require_room(folder: Path, size_gb: float) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < size_gb:
        raise SetupError(
            f"This needs about {size_gb:.1f} GB in {folder}, and {free_gb:.1f} GB are free: free some space, or choose "
            "another folder with --comfyui DIR."
        )


def _report(chosen: Installation) -> None:
    """Run `comfyui-tpu doctor`, and print how to start ComfyUI."""
    command = [chosen.venv.program("comfyui-tpu"), "doctor"]
    code = subprocess.run(command, cwd=ROOT, env=start_environment(chosen)).returncode
    if code:
        say(f"doctor ended with {code}; the problems above can be fixed later")
    folder = f" --comfyui {chosen.comfyui}" if chosen.comfyui != layout(None).comfyui else ""
    say(f"installed; start ComfyUI with: python3 setup.py start{folder}")


def start_environment(chosen: Installation) -> dict[str, str]:
    """Return the environment of ComfyUI and of the installations that it starts.

    It has the user's folder for temporary files, because the installation's no longer exists.
    """
    return {**replace(chosen.venv, variables={}).environment(), **_start_variables(chosen)}


def _start_variables(chosen: Installation) -> dict[str, str]:
    # As a URL, which has no spaces: pip and uv split the value at spaces into several files.
    constraints = chosen.constraints.as_uri()
    variables = {"COMFYUI_PATH": str(chosen.comfyui), "PIP_CONSTRAINT": constraints, "UV_CONSTRAINT": constraints}
    # After a chip halts, the process cannot use the chips any more and restarts itself.
    variables["COMFYUI_TPU_RESTARTS"] = "1"
    return {**{name: os.environ.get(name, value) for name, value in chosen.caches.items()}, **variables}

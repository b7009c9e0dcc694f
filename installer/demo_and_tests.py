"""`setup.py demo` and `setup.py test`, which install everything into `.venv` next to setup.py."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from . import changed_tests
from .machine import ROOT, comfyui_folder
from .terminal import SetupError, say
from .venv import Venv, install_this_folder, normalize_name, requirement_lines

_FOLDER = ROOT / ".venv"
VENV = Venv(folder=_FOLDER, log=_FOLDER / "install.log", root=ROOT)
DEMO_WORKFLOW = "examples/api/wan21_t2v_720p.json"
DEMO_VIDEO = ROOT / "output" / "demo" / "wan21.mp4"

# Each needs torchvision or PyTorch itself, and the nodes under test need none of them.
COMFYUI_SKIPPED = frozenset({"torch", "torchvision", "torchaudio", "spandrel", "kornia"})

# Checks before any test runs. basedpyright is pyright with its own Node.js; pyright's package downloads one.
STYLE = (("ruff", "check", "."), ("ruff", "format", "--check", "."))
TYPES = (("basedpyright", "--level", "error"),)

# pytest's arguments for `test --fast`: one full run per family, and quick tests; no server, no browser.
FAST = ("-m", "not slow and not recorded")
# Or the tests of the files that differ from a commit, HEAD or --changed=COMMIT.
CHANGED = "--changed"


# --- skipping finished installations ----------------------------------------------------------------------------------


def install_key(extra: str = "") -> str:
    """Return a key that changes with everything an installation depends on, also with the folder's path and Python."""
    names = ("pyproject.toml", "requirements.txt", "supported.txt", VENV.constraints.name)
    parts = [*((ROOT / name).read_text() for name in names), sys.version, str(ROOT), extra]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def once(name: str, key: str, action: Callable[[], None], venv: Path = VENV.folder) -> None:
    """Run `action` unless it has succeeded with the same `key` before.

    name: of the stamp file that records this, in `venv`.
    """
    stamp = venv / f"installed-{name}"
    if stamp.is_file() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    action()
    stamp.write_text(key)


# --- steps ------------------------------------------------------------------------------------------------------------


def install_base() -> None:
    """Install PyTorch for the CPU, requirements.txt, and this folder as the package comfyui_tpu."""
    VENV.make()
    VENV.install_torch()
    requirements = ("-r", str(ROOT / "requirements.txt"))
    VENV.install("installing requirements.txt", VENV.constrained_command(VENV.torch_requirement(), *requirements))
    install_this_folder(VENV)
    VENV.require_cpu_build()


def install_test_extras() -> None:
    """Install the packages that the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["test"]
    VENV.install(f"installing {', '.join(extras)}", VENV.constrained_command(*extras))
    VENV.require_cpu_build()


# --- a real ComfyUI for the tests -------------------------------------------------------------------------------------


def comfyui_requirements(text: str) -> list[str]:
    """Return the lines of ComfyUI's requirements.txt that its nodes need in addition to installed packages."""
    return [line for line in requirement_lines(text) if project_name(line) not in COMFYUI_SKIPPED]


def project_name(requirement: str) -> str:
    """Return the normalized name in a requirement."""
    return normalize_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def install_comfyui_requirements() -> None:
    """Install the requirements of the ComfyUI that the tests run against, if there is one."""
    folder = comfyui_folder(os.environ)
    if not (folder / "main.py").is_file():
        say(f"no ComfyUI in {folder}: its tests are skipped (set COMFYUI_PATH to run them)")
        return
    requirements = comfyui_requirements((folder / "requirements.txt").read_text())
    command = VENV.constrained_command(VENV.torch_requirement(), *requirements)
    advice = "To test without ComfyUI: COMFYUI_PATH=none python3 setup.py test"

    def action() -> None:
        VENV.install(f"installing what ComfyUI in {folder} needs", command, advice=advice)
        VENV.require_cpu_build()

    once("comfyui", install_key("\n".join(requirements)), action)
    say(f"ComfyUI tests run against {folder}")


# --- verbs ------------------------------------------------------------------------------------------------------------


def run(command: Sequence[str]) -> int:
    """Run `command` in the repository; return its exit code, a shell's number if a signal ended it.

    Bytecode is kept whatever the environment says: servers and children of the tests are Python processes of their own,
    and each would otherwise compile the sources of ComfyUI and the pack again.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return code if code >= 0 else 128 - code


def demo(arguments: Sequence[str]) -> int:
    """Makes a short video with Wan 2.1's tiny checkpoint (needs the network)"""
    if arguments:
        raise SetupError(f"demo takes no arguments; it got: {shlex.join(arguments)}")
    once("base", install_key(), install_base)
    DEMO_VIDEO.unlink(missing_ok=True)
    command = [VENV.program("comfyui-tpu"), "run", DEMO_WORKFLOW, "--tiny", "--out", str(DEMO_VIDEO.parent)]
    code = run(command)
    if code:
        return code
    if not DEMO_VIDEO.is_file():
        raise SetupError(f"The workflow {DEMO_WORKFLOW} ended without an error, but {DEMO_VIDEO} is not there.")
    say(f"the video is {DEMO_VIDEO}")
    return 0


def test(arguments: Sequence[str]) -> int:
    """Runs ruff, pyright and the tests, or some: --fast, --changed; the rest goes to pytest (needs the network)"""
    fast, chosen = "--fast" in arguments, [word for word in arguments if word != "--fast"]
    chosen, files = _tests_of_changes(chosen)
    once("base", install_key(), install_base)
    once("test", install_key(), install_test_extras)
    if not fast:
        install_comfyui_requirements()
    for program, *rest in () if chosen else STYLE if fast else (*STYLE, *TYPES):
        code = run([VENV.program(program), *rest])
        if code:
            return code
    selection = [*(FAST if fast else ()), *spread(chosen), *chosen, *files]
    return run([VENV.program("python"), "-m", "pytest", *selection])


def _tests_of_changes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without --changed, and the files of tests that it chooses."""
    asked = [word for word in arguments if word.partition("=")[0] == CHANGED]
    if not asked:
        return list(arguments), []
    changed = changed_tests.list_changed(ROOT, asked[-1].partition("=")[2] or "HEAD")
    if not changed:
        raise SetupError("No file differs from the commit. Name an older one: --changed=COMMIT.")
    files = changed_tests.choose_tests(ROOT, changed)
    say(f"{len(changed)} changed files, {len(files)} files of tests")
    return [word for word in arguments if word not in asked], files


def spread(arguments: Sequence[str]) -> list[str]:
    """Return pytest's arguments for three workers, one file each at a time, in a full run.

    None for selected tests, which start faster without workers.

    Three on two cores, because each sometimes waits for a server, a browser or a compiler. In the files' order: sorted
    by number of tests, the few long files would run last, on one worker.
    """
    return [] if arguments else ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]

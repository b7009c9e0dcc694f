"""Sets ComfyUI-TPU up in `.venv` beside this file, then runs what was asked for. Standard library only.

Build back ends execute this file too: then it hands over to setuptools, which reads pyproject.toml.
It touches no system Python, no pip configuration and no shell start-up file.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this is the line that says so to older ones
    sys.exit(
        f"ComfyUI-TPU needs Python 3.11 or newer; this is Python {sys.version.split()[0]} ({sys.executable}). "
        "Run this file with a newer one, for example: python3.11 setup.py demo"
    )

import hashlib
import os
import re
import shlex
import ssl
import subprocess
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
LOG = VENV / "install.log"
CONSTRAINTS = ROOT / "constraints.txt"
CONSTRAINED = ("-c", str(CONSTRAINTS))
DEMO_WORKFLOW = "examples/wan21_t2v_720p.json"
DEMO_VIDEO = ROOT / "output" / "demo" / "wan21.mp4"

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_ADVICE = (
    f"Make {CPU_INDEX} reachable, or give pip a folder with the CPU wheel: PIP_FIND_LINKS=FOLDER python3 setup.py ..."
)
PROBE_S = 3
# Each needs torchvision or PyTorch itself, and the nodes under test need none of them.
COMFYUI_SKIPPED = frozenset({"torch", "torchvision", "torchaudio", "spandrel", "kornia"})
# Without these, libtpu asks a cloud's metadata server and locks itself to one process.
NO_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

# What is looked at before any test runs. basedpyright is pyright with its own Node.js; pyright's package downloads one.
STYLE = (("ruff", "check", "."), ("ruff", "format", "--check", "."))
TYPES = (("basedpyright", "--level", "error"),)

# pytest's words for `test --fast`: no server, no browser, no real-size compile, one whole run a family.
FAST = ("-m", "not slow and not recorded")

BACKEND_COMMANDS = frozenset({"egg_info", "dist_info", "editable_wheel", "bdist_wheel", "sdist", "build", "develop"})


class SetupError(Exception):
    """Ends the run with its message, a sentence for the user."""


# --- pip and its commands ---------------------------------------------------------------------------------------------


def venv_program(name: str) -> str:
    return str(VENV / "bin" / name)


def pip(*arguments: str, network: Sequence[str] = ()) -> list[str]:
    """A pip command of our venv; `network` are pip's options before the verb."""
    return [venv_program("python"), "-m", "pip", *network, *arguments]


def pinned(name: str, constraints: str) -> str:
    """The line of `constraints` that pins `name`, such as "torch==2.13.0"."""
    pins = [line.strip() for line in constraints.splitlines() if line.startswith(f"{name}==")]
    if len(pins) != 1:
        raise SetupError(f"constraints.txt pins {name} {len(pins)} times; it must do so once, as {name}==VERSION.")
    return pins[0]


def torch_commands(torch: str, *, index_reachable: bool) -> list[list[str]]:
    """The pip commands that may bring PyTorch, in the order to try them: its own CPU index, then pip's configuration.

    Without dependencies: a CUDA build is noticed before its gigabytes of nvidia packages come.
    """
    install = ("install", "--no-deps", torch, *CONSTRAINED)
    cpu_index = pip(*install, "--index-url", CPU_INDEX, network=("--timeout", "5", "--retries", "0"))
    return [cpu_index, pip(*install)] if index_reachable else [pip(*install)]


def answers(url: str, timeout_s: float) -> bool:
    """Whether a server answers at `url`, be it with a refusal, asked through the proxies pip would use."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # pip may hold a certificate that we do not
    except OSError:
        return False
    return True


def is_reachable(url: str, timeout_s: float) -> bool:
    """`answers` within `timeout_s`; in a thread, because looking a name up has a longer timeout of its own."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(answers(url, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer == [True]


def cuda_traces(python: str) -> str:
    """What in the venv belongs to a CUDA build of PyTorch; empty if there is nothing. Does not import torch."""
    program = (
        "import importlib.metadata as m, importlib.util as u, pathlib, runpy\n"
        "spec = u.find_spec('torch')\n"
        "version = runpy.run_path(pathlib.Path(spec.origin).with_name('version.py')) if spec else {}\n"
        "cuda = version.get('cuda')\n"
        "names = {d.metadata['Name'] for d in m.distributions()}\n"
        "found = sorted(n for n in names if n and n.lower().startswith('nvidia-'))\n"
        "print(', '.join(([f'torch for CUDA {cuda}'] if cuda else []) + found))\n"
    )
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


# --- what is installed already ----------------------------------------------------------------------------------------


def digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install_key(extra: str = "") -> str:
    """Changes with everything an installation depends on, also when the folder was moved or Python replaced."""
    files = [(ROOT / name).read_text() for name in ("pyproject.toml", "requirements.txt", "constraints.txt")]
    return digest([*files, sys.version, str(ROOT), extra])


def once(name: str, key: str, action: Callable[[], None], venv: Path = VENV) -> None:
    """Runs `action` unless it ended well with the same `key` before."""
    stamp = venv / f"installed-{name}"
    if stamp.is_file() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    action()
    stamp.write_text(key)


# --- steps ------------------------------------------------------------------------------------------------------------


def say(message: str) -> None:
    print(f"[setup] {message}", flush=True)


def logged(command: Sequence[str]) -> int:
    """Runs `command` with its output at the end of the log; returns its exit code."""
    with LOG.open("a") as output:
        output.write(f"\n$ {shlex.join(command)}\n")
        output.flush()
        environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode


def install(message: str, command: Sequence[str], *, advice: str = "") -> None:
    """One step of the installation.

    Raises SetupError with the end of pip's output and `advice`.
    """
    say(message)
    started = time.monotonic()
    if logged(command):
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-25:])
        raise SetupError(
            f"{tail}\n\nThis failed: {message}. pip's whole output is in {LOG}. "
            f"{advice or 'Mend what its last lines say and run the same command again; it goes on from here.'}"
        )
    say(f"  done in {time.monotonic() - started:.0f} s")


def make_venv() -> None:
    """Makes `.venv`, or makes it anew when its Python or pip no longer runs."""
    check = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
    python = venv_program("python")
    if Path(python).exists() and subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
        return
    say(f"making {VENV} with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(
            f"{(made.stderr or made.stdout).strip()}\n\n{sys.executable} could not make the environment {VENV}. "
            f"If its venv or ensurepip module is missing: sudo apt install python3.{sys.version_info[1]}-venv"
        )


def torch_pin() -> str:
    return pinned("torch", CONSTRAINTS.read_text())


def install_torch() -> None:
    """PyTorch as the CPU build; SetupError if only a CUDA build could be had."""
    *attempts, last = torch_commands(torch_pin(), index_reachable=is_reachable(f"{CPU_INDEX}/torch/", PROBE_S))
    for command in attempts:
        say(f"installing {torch_pin()} from {CPU_INDEX}")
        if logged(command) == 0:
            break
    else:
        say(f"nothing from {CPU_INDEX}: asking what pip is configured with")
        install(f"installing {torch_pin()}", last, advice=CPU_ADVICE)
    require_cpu_build()


def require_cpu_build() -> None:
    found = cuda_traces(venv_program("python"))
    if found:
        logged(pip("uninstall", "-y", "torch", *re.findall(r"nvidia-[\w.-]+", found)))
        raise SetupError(f"pip brought {found}; only PyTorch's CPU build belongs into {VENV}. {CPU_ADVICE}")


def install_base() -> None:
    """PyTorch for the CPU, requirements.txt, and this folder as the package comfyui_tpu."""
    make_venv()
    install_torch()
    requirements = ("-r", str(ROOT / "requirements.txt"))
    install("installing requirements.txt", pip("install", *CONSTRAINED, torch_pin(), *requirements))
    # setuptools first and no build isolation: a build environment of its own would ask the network again.
    install("installing setuptools", pip("install", *CONSTRAINED, "setuptools"))
    install("installing this folder", pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)))
    require_cpu_build()


def install_test_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["test"]
    install(f"installing {', '.join(extras)}", pip("install", *CONSTRAINED, *extras))
    require_cpu_build()


# --- a real ComfyUI for the tests -------------------------------------------------------------------------------------


def comfyui_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()


def comfyui_requirements(text: str) -> list[str]:
    """The lines of ComfyUI's requirements.txt that its nodes need beside what is installed already."""
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and project_name(line) not in COMFYUI_SKIPPED]


def project_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def install_comfyui_requirements() -> None:
    folder = comfyui_folder(os.environ)
    if not (folder / "main.py").is_file():
        say(f"no ComfyUI in {folder}: its tests are skipped (set COMFYUI_PATH to run them)")
        return
    wanted = comfyui_requirements((folder / "requirements.txt").read_text())
    command = pip("install", *CONSTRAINED, torch_pin(), *wanted)
    advice = "To test without ComfyUI: COMFYUI_PATH=none python3 setup.py test"

    def action() -> None:
        install(f"installing what ComfyUI in {folder} needs", command, advice=advice)
        require_cpu_build()

    once("comfyui", install_key("\n".join(wanted)), action)
    say(f"ComfyUI tests run against {folder}")


# --- verbs ------------------------------------------------------------------------------------------------------------


def has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `command` in the repository; returns its exit code, a shell's number if a signal ended it."""
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
    return code if code >= 0 else 128 - code


def demo(arguments: Sequence[str]) -> int:
    """Makes a short video with Wan 2.1's tiny checkpoint"""
    if arguments:
        raise SetupError(f"demo takes no arguments; it got: {shlex.join(arguments)}")
    once("base", install_key(), install_base)
    DEMO_VIDEO.unlink(missing_ok=True)
    command = [venv_program("comfyui-tpu"), "run", DEMO_WORKFLOW, "--tiny", "--out", str(DEMO_VIDEO.parent)]
    code = run(command, {} if has_tpu() else NO_TPU)
    if code:
        return code
    if not DEMO_VIDEO.is_file():
        raise SetupError(f"The workflow {DEMO_WORKFLOW} ended without an error, but {DEMO_VIDEO} is not there.")
    say(f"the video is {DEMO_VIDEO}")
    return 0


def test(arguments: Sequence[str]) -> int:
    """Runs ruff, pyright and the tests, with --fast in three minutes (no pyright); what follows goes to pytest"""
    fast, chosen = "--fast" in arguments, [word for word in arguments if word != "--fast"]
    once("base", install_key(), install_base)
    once("test", install_key(), install_test_extras)
    if not fast:
        install_comfyui_requirements()
    for program, *rest in () if chosen else STYLE if fast else (*STYLE, *TYPES):
        code = run([venv_program(program), *rest], {})
        if code:
            return code
    selection = [*(FAST if fast else ()), *spread(chosen), *chosen]
    return run([venv_program("python"), "-m", "pytest", *selection], NO_TPU)


def spread(arguments: Sequence[str]) -> list[str]:
    """Three workers, a file each at a time, for a whole run; a choice of tests starts sooner without them.

    Three on two cores, because each waits now and then: for a server, a browser, a compiler in another process. In the
    files' own order: by their number of tests the few long ones would come last, on one worker.
    """
    return [] if arguments else ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]


VERBS = {"demo": demo, "test": test}


def usage() -> str:
    verbs = "\n".join(f"  {name:<8} {verb.__doc__}" for name, verb in VERBS.items())
    return f"usage: python3 setup.py VERB [ARGUMENTS]\n\n{verbs}\n\nEverything is installed into {VENV}."


def is_for_backend(arguments: Sequence[str]) -> bool:
    """Whether a build back end is calling: its first word is a setuptools command."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return bool(words) and words[0] in BACKEND_COMMANDS


def main(arguments: Sequence[str]) -> int:
    """Exit code of the verb; 2 for a word that is none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    verb = VERBS.get(arguments[0])
    if verb is None:
        print(f"setup.py: {arguments[0]!r} is not one of {', '.join(VERBS)}.\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return verb(arguments[1:])
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if is_for_backend(sys.argv[1:]):
        from setuptools import setup

        setup()
    else:
        sys.exit(main(sys.argv[1:]))

"""A virtual environment of our own, pip in it, and PyTorch as its CPU build."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .terminal import SetupError, logged, say, tail

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_ADVICE = (
    f"Make {CPU_INDEX} reachable, or give pip a folder with the CPU wheel: PIP_FIND_LINKS=FOLDER python3 setup.py ..."
)
# Would let packages of another environment pass for installed ones, or send ours elsewhere.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
# Any of these in pip's output means that it could not reach its index.
NO_NETWORK = re.compile(
    "Failed to establish a new connection|name resolution|Name or service not known|Network is unreachable"
    "|ConnectTimeoutError|Cannot connect to proxy|No route to host",
    re.IGNORECASE,
)
NO_SPACE = re.compile("No space left on device|Disk quota exceeded", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Venv:
    """A virtual environment in `folder`, pip's output in `log`, and what pip must keep to, in `constraints`."""

    folder: Path
    log: Path
    root: Path
    constraints: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def python(self) -> str:
        return self.program("python")

    def environment(self) -> dict[str, str]:
        """What commands in the venv are run with: the user's, without what belongs to other environments."""
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        return {**kept, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **self.variables}

    def make(self, *, any_python: bool = False) -> None:
        """Creates the folder, or recreates it when its Python or pip no longer runs.

        Another Python than this one will do if `any_python`.
        """
        if self.is_usable(any_python=any_python):
            return
        say(f"making {self.folder} with Python {sys.version.split()[0]}")
        shutil.rmtree(self.folder, ignore_errors=True)
        commands = [[sys.executable, "-m", "venv", str(self.folder)]]
        if uv := shutil.which("uv"):  # Debian's Python may lack ensurepip, which `venv` needs and uv does not
            commands.insert(0, [uv, "venv", "--seed", "--python", sys.executable, str(self.folder)])
        for command in commands:
            made = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
            if made.returncode == 0:
                return
            shutil.rmtree(self.folder, ignore_errors=True)
        raise SetupError(
            f"{(made.stderr or made.stdout).strip()}\n\n{sys.executable} could not make the environment {self.folder}. "
            f"If its venv or ensurepip module is missing: sudo apt install python3.{sys.version_info[1]}-venv"
        )

    def is_usable(self, *, any_python: bool) -> bool:
        wanted = "sys.version_info >= (3, 11)" if any_python else f"sys.version_info[:2] == {sys.version_info[:2]!r}"
        if not Path(self.python).exists():
            return False
        check = [self.python, "-c", f"import pip, sys; sys.exit(not {wanted})"]
        try:
            return subprocess.run(check, env=self.environment(), stderr=subprocess.DEVNULL).returncode == 0
        except OSError:
            return False

    # --- pip ----------------------------------------------------------------------------------------------------------

    def pip(self, *arguments: str, network: Sequence[str] = ()) -> list[str]:
        """A pip command of this venv; `network` are pip's options before the verb."""
        return [self.python, "-m", "pip", *network, *arguments]

    def constrained(self, *arguments: str) -> list[str]:
        return self.pip("install", "-c", str(self.constraints), *arguments)

    def run(self, command: Sequence[str]) -> int:
        """Runs `command` with its output at the end of the log; returns its exit code."""
        return logged(command, self.log, self.environment(), self.root)

    def install(self, message: str, *commands: Sequence[str], advice: str = "") -> None:
        """One step of the installation: the first of `commands` that succeeds.

        Raises SetupError with the end of pip's output and `advice`.
        """
        say(message)
        started = time.monotonic()
        if all(self.run(command) for command in commands):
            raise SetupError(self._complaint(message, advice))
        say(f"  done in {time.monotonic() - started:.0f} s")

    def _complaint(self, message: str, advice: str) -> str:
        end = tail(self.log, 25)
        again = "run the same command again; it goes on from here."
        where = f"pip's full output is in {self.log}."
        if NO_SPACE.search(end):
            return f"This failed, because the disk is full: {message}. Make room and {again} {where}"
        if NO_NETWORK.search(end):
            return (
                f"This failed, because pip could not reach its index: {message}. "
                f"{advice or f'Fix the network, or set pip up for a mirror, and {again}'} {where}"
            )
        return (
            f"{end}\n\nThis failed: {message}. {where} "
            f"{advice or f'Fix what its last lines say and {again}'}"
        )  # fmt: skip

    def versions(self) -> dict[str, str]:
        """The installed packages by their normalized names. A package whose installation was cut off is left out."""
        found = importlib.metadata.distributions(path=[str(path) for path in self.site_packages()])
        return {normalized(each.name): each.version for each in found if each.name and each.read_text("INSTALLER")}

    def site_packages(self) -> list[Path]:
        return sorted(self.folder.glob("lib/python3*/site-packages"))

    def forget_half_installed(self) -> None:
        """Makes pip install again what it had not finished; it writes INSTALLER last, and `~` names are its own."""
        for site in self.site_packages():
            unfinished = [path for path in site.glob("*.dist-info") if not (path / "INSTALLER").is_file()]
            for path in [*unfinished, *site.glob("~*")]:
                shutil.rmtree(path, ignore_errors=True)

    # --- PyTorch ------------------------------------------------------------------------------------------------------

    def pins(self, names: Sequence[str]) -> list[str]:
        text = self.constraints.read_text()
        return [pinned(name, text) for name in names]

    def torch_commands(self, names: Sequence[str]) -> list[list[str]]:
        """The pip commands that may bring PyTorch, in the order to try them: its own CPU index, asked once and shortly,
        then pip's own configuration.

        Without dependencies: a CUDA build is noticed before its gigabytes of nvidia packages come.
        """
        install = ("install", "-c", str(self.constraints), "--no-deps", *self.pins(names))
        cpu_index = self.pip(*install, "--index-url", CPU_INDEX, network=("--timeout", "5", "--retries", "0"))
        return [cpu_index, self.pip(*install)]

    def install_torch(self, names: Sequence[str] = ("torch",)) -> None:
        """PyTorch as the CPU build; SetupError if only a CUDA build could be had."""
        message = f"installing {', '.join(self.pins(names))} from {CPU_INDEX}, or else as pip is configured"
        self.install(message, *self.torch_commands(names), advice=CPU_ADVICE)
        self.require_cpu_build()

    def require_cpu_build(self) -> None:
        """SetupError, and what is wrong uninstalled, if the venv holds a CUDA build."""
        found = cuda_traces(self.python, self.environment())
        if found:
            self.run(self.pip("uninstall", "-y", *re.findall(r"\btorch(?:vision|audio)?\b|nvidia-[\w.-]+", found)))
            raise SetupError(f"pip brought {found}; only PyTorch's CPU build belongs into {self.folder}. {CPU_ADVICE}")


def install_this_folder(venv: Venv) -> None:
    """The pack as the package comfyui_tpu, and the comfyui-tpu command."""
    # setuptools first and no build isolation: a build environment of its own would ask the network again.
    venv.install("installing setuptools", venv.constrained("setuptools"))
    folder = venv.pip("install", "--no-deps", "--no-build-isolation", "-e", str(venv.root))
    venv.install("installing this folder", folder)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(text: str) -> list[str]:
    """The requirements of a file, without comments and pip's options."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and line[0] not in "#-"]


def pinned(name: str, constraints: str) -> str:
    """The line of `constraints` that pins `name`, such as "torch==2.13.0"."""
    pins = [line.strip() for line in constraints.splitlines() if line.startswith(f"{name}==")]
    if len(pins) != 1:
        raise SetupError(f"constraints.txt pins {name} {len(pins)} times; it must do so once, as {name}==VERSION.")
    return pins[0]


def cuda_traces(python: str, environment: Mapping[str, str] | None = None) -> str:
    """What in the venv belongs to a CUDA build of PyTorch; empty if there is nothing. Imports none of it.

    torch says so in its version.py; torchvision's and torchaudio's libraries want CUDA's runtime.
    """
    program = (
        "import importlib.metadata as m, importlib.util as u, pathlib, runpy\n"
        "folders = {n: pathlib.Path(s.origin).parent for n in ('torch', 'torchvision', 'torchaudio')\n"
        "           if (s := u.find_spec(n)) and s.origin}\n"
        "torch = folders.pop('torch', None)\n"
        "cuda = runpy.run_path(torch / 'version.py').get('cuda') if torch else None\n"
        "found = [f'torch for CUDA {cuda}'] if cuda else []\n"
        "found += [f'{n} for CUDA' for n, f in folders.items()\n"
        "          if any(b'libcudart' in library.read_bytes() for library in f.rglob('*.so'))]\n"
        "names = {d.metadata['Name'] for d in m.distributions()}\n"
        "found += sorted(n for n in names if n and n.lower().startswith('nvidia-'))\n"
        "print(', '.join(found))\n"
    )
    done = subprocess.run([python, "-c", program], env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()

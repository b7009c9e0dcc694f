"""A virtual environment of our own, PyTorch in it as its CPU build, and uv, which installs there, or pip without it."""

import functools
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
# Any of these in pip's or uv's output means that it could not reach its index.
NO_NETWORK = re.compile(
    "Failed to establish a new connection|name resolution|Name or service not known|Network is unreachable"
    "|ConnectTimeoutError|Cannot connect to proxy|No route to host|error sending request",
    re.IGNORECASE,
)
NO_SPACE = re.compile("No space left on device|Disk quota exceeded", re.IGNORECASE)
# pip's settings, which uv does not read, as uv's options and variables.
UV_OPTIONS = {
    "index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links",
    "constraint": "--constraints", "trusted-host": "--allow-insecure-host",
}  # fmt: skip
UV_VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}


@dataclass(frozen=True, kw_only=True)
class Venv:
    """A virtual environment in `folder` for the pack in `root`, and the output of what is installed there in `log`."""

    folder: Path
    log: Path
    root: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def python(self) -> str:
        return self.program("python")

    @property
    def constraints(self) -> Path:
        """The versions that were tested together with the environment's Python."""
        minors = [int(site.parent.name.removeprefix("python3.").rstrip("t")) for site in self.site_packages()]
        newest = max(minors, default=sys.version_info[1]) >= 12
        return self.root / ("constraints-newest.txt" if newest else "constraints.txt")

    def environment(self) -> dict[str, str]:
        """What commands in the venv are run with: the user's, without what belongs to other environments."""
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        return {**kept, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **self.variables}

    def make(self, *, any_python: bool = False) -> None:
        """Creates the folder, or recreates it when its Python or pip no longer runs.

        Another Python than this one will do if `any_python`.
        """
        if not self.is_usable(any_python=any_python):
            self._create()
        if self.uv is None and self.run(self.pip("install", "-c", str(self.constraints), "uv")):
            say("uv could not be installed; pip goes on without it, slower")

    def _create(self) -> None:
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

    # --- uv and pip ---------------------------------------------------------------------------------------------------

    @property
    def uv(self) -> str | None:
        """uv, which installs faster: this environment's, or the user's."""
        own = self.program("uv")
        return own if Path(own).is_file() else shutil.which("uv")

    def pip(self, *arguments: str) -> list[str]:
        """A pip command of this venv."""
        return [self.python, "-m", "pip", *arguments]

    def installs(self, *arguments: str, index: str | None = None) -> list[str]:
        """The command that installs what `pip install ARGUMENTS` does. `index` is asked in place of the usual one, once
        and shortly.
        """
        if self.uv is None:
            hurried = ["--index-url", index, "--timeout", "5", "--retries", "0"] if index else []
            return self.pip("install", *hurried, *arguments)
        settings = {**self.settings, "index-url": index} if index else self.settings
        variables = [f"{name}={settings[own]}" for own, name in UV_VARIABLES.items() if own in settings]
        hurried = ["UV_HTTP_TIMEOUT=5", "UV_HTTP_RETRIES=0"] if index else []
        words = [
            word for own, name in UV_OPTIONS.items() for one in settings.get(own, "").split() for word in (name, one)
        ]
        if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
            words.append("--no-index")
        # As pip does: of all indexes the newest version that fits.
        every = ["--index-strategy", "unsafe-best-match", *words, *arguments]
        return ["env", *variables, *hurried, self.uv, "pip", "install", "--python", self.python, *every]

    def constrained(self, *arguments: str, index: str | None = None) -> list[str]:
        return self.installs("-c", str(self.constraints), *arguments, index=index)

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """pip's settings by their names: those of files, then of its verb `install`, then of variables."""
        done = subprocess.run(self.pip("config", "list"), env=self.environment(), capture_output=True, text=True)
        ranked = {"global": {}, "install": {}, ":env:": {}}
        for scope, name, value in re.findall(r"^(global|install|:env:)\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE):
            ranked[scope][name] = value.replace("\\n", " ").strip()
        return {**ranked["global"], **ranked["install"], **ranked[":env:"]}

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
        where = f"The full output is in {self.log}."
        if NO_SPACE.search(end):
            return f"This failed, because the disk is full: {message}. Make room and {again} {where}"
        if NO_NETWORK.search(end):
            return (
                f"This failed, because the index of packages could not be reached: {message}. "
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
        """The commands that may bring PyTorch, in the order to try them: from its own CPU index, then as pip is set up.

        Linux's build for the CPU says so in its version: nothing else is downloaded. Without dependencies, which a CUDA
        build of what belongs to it would have.
        """
        build = "+cpu" if sys.platform == "linux" else ""
        wanted = [f"{pin}{build}" if pin.startswith("torch==") else pin for pin in self.pins(names)]
        arguments = ("--no-deps", *wanted)
        return [self.constrained(*arguments, index=CPU_INDEX), self.constrained(*arguments)]

    def install_torch(self, names: Sequence[str] = ("torch",)) -> None:
        """PyTorch as the CPU build; SetupError if it could not be had."""
        message = f"installing {', '.join(self.pins(names))} from {CPU_INDEX}, or else as pip is configured"
        self.install(message, *self.torch_commands(names), advice=CPU_ADVICE)
        self.require_cpu_build()

    def torch_as_it_is(self) -> str:
        """The requirement that keeps the very build of PyTorch that is installed."""
        return f"torch=={self.versions()['torch']}"

    def require_cpu_build(self) -> None:
        """SetupError, and what is wrong uninstalled, if the venv holds a CUDA build."""
        found = cuda_traces(self.python, self.environment())
        if found:
            self.run(self.pip("uninstall", "-y", *re.findall(r"\btorch(?:vision|audio)?\b|nvidia-[\w.-]+", found)))
            raise SetupError(
                f"What was installed brought {found}; only PyTorch's CPU build belongs into {self.folder}. {CPU_ADVICE}"
            )


def install_this_folder(venv: Venv) -> None:
    """The pack as the package comfyui_tpu, and the comfyui-tpu command."""
    # setuptools first and no build isolation: a build environment of its own would ask the network again.
    venv.install("installing setuptools", venv.constrained("setuptools"))
    folder = venv.installs("--no-deps", "--no-build-isolation", "-e", str(venv.root))
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
        raise SetupError(f"The constraints pin {name} {len(pins)} times; they must once, as {name}==VERSION.")
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

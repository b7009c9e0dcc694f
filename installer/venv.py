"""Our virtual environment with PyTorch's CPU build; uv installs packages there, or else pip."""

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

from .terminal import SetupError, run_logged, say, tail

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_ADVICE = (
    f"Make {CPU_INDEX} reachable, or give pip a folder with the CPU wheel: PIP_FIND_LINKS=FOLDER python3 setup.py ..."
)
# Variables that would make packages of other environments count as installed, or install ours elsewhere.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
# Patterns in the output of pip and uv if the index is unreachable.
NO_NETWORK = re.compile(
    "Failed to establish a new connection|name resolution|Name or service not known|Network is unreachable"
    "|ConnectTimeoutError|Cannot connect to proxy|No route to host|error sending request",
    re.IGNORECASE,
)
NO_SPACE = re.compile("No space left on device|Disk quota exceeded", re.IGNORECASE)
# uv's options and variables for pip's settings, which uv does not read.
UV_OPTIONS = {
    "index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links",
    "constraint": "--constraints", "trusted-host": "--allow-insecure-host",
}  # fmt: skip
UV_VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}


@dataclass(frozen=True, kw_only=True)
class Venv:
    """A virtual environment in `folder` for the pack in `root`; `log` gets the output of installations."""

    folder: Path
    log: Path
    root: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def program(self, name: str) -> str:
        """Return the path of a program in the environment."""
        return str(self.folder / "bin" / name)

    @property
    def python(self) -> str:
        return self.program("python")

    @property
    def constraints(self) -> Path:
        """Return the file of versions that were tested together with the environment's Python."""
        minors = [int(site.parent.name.removeprefix("python3.").rstrip("t")) for site in self.site_packages()]
        newest = max(minors, default=sys.version_info[1]) >= 12
        return self.root / ("constraints-newest.txt" if newest else "constraints.txt")

    def environment(self) -> dict[str, str]:
        """Return the environment of commands in the venv: the user's, without variables of other environments."""
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        return {**kept, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **self.variables}

    def make(self, *, any_python: bool = False) -> None:
        """Create the environment, or recreate it if its Python or pip does not run.

        any_python: whether it may have another Python than this one.
        """
        if not self.is_usable(any_python=any_python):
            self._create()
        if self.uv is None and self.run(self.pip("install", "-c", str(self.constraints), "uv")):
            say("uv could not be installed; pip is used instead, which is slower")

    def _create(self) -> None:
        say(f"creating {self.folder} with Python {sys.version.split()[0]}")
        shutil.rmtree(self.folder, ignore_errors=True)
        commands = [[sys.executable, "-m", "venv", str(self.folder)]]
        if uv := shutil.which("uv"):  # Debian's Python may lack ensurepip, which `venv` needs and uv does not
            commands.insert(0, [uv, "venv", "--seed", "--python", sys.executable, str(self.folder)])
        output = ""
        for command in commands:
            made = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
            if made.returncode == 0:
                return
            output = (made.stderr or made.stdout).strip()
            shutil.rmtree(self.folder, ignore_errors=True)
        raise SetupError(
            f"{output}\n\n{sys.executable} could not create the environment {self.folder}. "
            f"If its venv or ensurepip module is missing: sudo apt install python3.{sys.version_info[1]}-venv"
        )

    def is_usable(self, *, any_python: bool) -> bool:
        """Return whether its Python and pip run.

        any_python: whether it may have another Python than this one.
        """
        condition = "sys.version_info >= (3, 11)" if any_python else f"sys.version_info[:2] == {sys.version_info[:2]!r}"
        if not Path(self.python).exists():
            return False
        check = [self.python, "-c", f"import pip, sys; sys.exit(not {condition})"]
        try:
            return subprocess.run(check, env=self.environment(), stderr=subprocess.DEVNULL).returncode == 0
        except OSError:
            return False

    # --- uv and pip ---------------------------------------------------------------------------------------------------

    @property
    def uv(self) -> str | None:
        """Return the path of uv, which installs faster: this environment's, or the user's."""
        local = self.program("uv")
        return local if Path(local).is_file() else shutil.which("uv")

    def pip(self, *arguments: str) -> list[str]:
        """Return a pip command of this venv."""
        return [self.python, "-m", "pip", *arguments]

    def install_command(self, *arguments: str, index: str | None = None) -> list[str]:
        """Return the command that installs what `pip install ARGUMENTS` would.

        index: used instead of the usual one, with one short attempt; None: the usual one.
        """
        if self.uv is None:
            hurried = ["--index-url", index, "--timeout", "5", "--retries", "0"] if index else []
            return self.pip("install", *hurried, *arguments)
        settings = {**self.settings, "index-url": index} if index else self.settings
        variables = [f"{name}={settings[key]}" for key, name in UV_VARIABLES.items() if key in settings]
        hurried = ["UV_HTTP_TIMEOUT=5", "UV_HTTP_RETRIES=0"] if index else []
        words = [
            word
            for key, name in UV_OPTIONS.items()
            for value in settings.get(key, "").split()
            for word in (name, value)
        ]
        if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
            words.append("--no-index")
        # Like pip, take the newest matching version of all indexes.
        every = ["--index-strategy", "unsafe-best-match", *words, *arguments]
        return ["env", *variables, *hurried, self.uv, "pip", "install", "--python", self.python, *every]

    def constrained_command(self, *arguments: str, index: str | None = None) -> list[str]:
        """Return the command that installs `arguments` within the tested versions.

        index: as in `install_command`.
        """
        return self.install_command("-c", str(self.constraints), *arguments, index=index)

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """Return pip's settings by name: from files, then for `install`, then from variables."""
        done = subprocess.run(self.pip("config", "list"), env=self.environment(), capture_output=True, text=True)
        ranked = {"global": {}, "install": {}, ":env:": {}}
        for scope, name, value in re.findall(r"^(global|install|:env:)\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE):
            ranked[scope][name] = value.replace("\\n", " ").strip()
        return {**ranked["global"], **ranked["install"], **ranked[":env:"]}

    def run(self, command: Sequence[str]) -> int:
        """Run `command` with its output appended to the log; return its exit code."""
        return run_logged(command, self.log, self.environment(), self.root)

    def install(self, message: str, *commands: Sequence[str], advice: str = "") -> None:
        """Run one step of the installation: the first of `commands` that succeeds.

        Raises SetupError with the end of the output and `advice`.
        """
        say(message)
        started = time.monotonic()
        if all(self.run(command) for command in commands):
            raise SetupError(self._complaint(message, advice))
        say(f"  done in {time.monotonic() - started:.0f} s")

    def _complaint(self, message: str, advice: str) -> str:
        end = tail(self.log, 25)
        again = "run the same command again; it resumes."
        where = f"The full output is in {self.log}."
        if NO_SPACE.search(end):
            return f"This failed, because the disk is full: {message}. Free some space and {again} {where}"
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
        """Return the installed packages by normalized name, without interrupted installations."""
        packages = importlib.metadata.distributions(path=[str(path) for path in self.site_packages()])
        return {
            normalize_name(package.name): package.version
            for package in packages
            if package.name and package.read_text("INSTALLER")
        }

    def site_packages(self) -> list[Path]:
        """Return the folders of packages."""
        return sorted(self.folder.glob("lib/python3*/site-packages"))

    def forget_half_installed(self) -> None:
        """Remove incomplete packages so that pip installs them again.

        pip writes INSTALLER last, and `~` names are its own temporary ones.
        """
        for site in self.site_packages():
            unfinished = [path for path in site.glob("*.dist-info") if not (path / "INSTALLER").is_file()]
            for path in [*unfinished, *site.glob("~*")]:
                shutil.rmtree(path, ignore_errors=True)

    # --- PyTorch ------------------------------------------------------------------------------------------------------

    def pins(self, names: Sequence[str]) -> list[str]:
        """Return the pins of these packages."""
        text = self.constraints.read_text()
        return [find_pin(name, text) for name in names]

    def torch_commands(self, names: Sequence[str]) -> list[list[str]]:
        """Return the commands that may install PyTorch, in order: from its own CPU index, then as pip is configured.

        On Linux the CPU build's version ends in +cpu, so nothing else is downloaded. Without dependencies, because
        those of a CUDA build could be installed.
        """
        build = "+cpu" if sys.platform == "linux" else ""
        pins = [f"{pin}{build}" if pin.startswith("torch==") else pin for pin in self.pins(names)]
        arguments = ("--no-deps", *pins)
        return [self.constrained_command(*arguments, index=CPU_INDEX), self.constrained_command(*arguments)]

    def install_torch(self, names: Sequence[str] = ("torch",)) -> None:
        """Install PyTorch's CPU build. Raises SetupError if that fails."""
        message = f"installing {', '.join(self.pins(names))} from {CPU_INDEX}, or else as pip is configured"
        self.install(message, *self.torch_commands(names), advice=CPU_ADVICE)
        self.require_cpu_build()

    def torch_requirement(self) -> str:
        """Return the requirement that keeps the installed build of PyTorch."""
        return f"torch=={self.versions()['torch']}"

    def require_cpu_build(self) -> None:
        """Raise SetupError if the venv has a CUDA build, after uninstalling it."""
        traces = cuda_traces(self.python, self.environment())
        if traces:
            self.run(self.pip("uninstall", "-y", *re.findall(r"\btorch(?:vision|audio)?\b|nvidia-[\w.-]+", traces)))
            raise SetupError(
                f"The installation added {traces}; only PyTorch's CPU build may be in {self.folder}. {CPU_ADVICE}"
            )


def install_this_folder(venv: Venv) -> None:
    """Install the pack as the package comfyui_tpu, with the command comfyui-tpu."""
    # setuptools first and no build isolation: a build environment of its own would ask the network again.
    venv.install("installing setuptools", venv.constrained_command("setuptools"))
    folder = venv.install_command("--no-deps", "--no-build-isolation", "-e", str(venv.root))
    venv.install("installing this folder", folder)


def normalize_name(name: str) -> str:
    """Return a normalized package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(text: str) -> list[str]:
    """Return the requirements in a file, without comments and pip's options."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and line[0] not in "#-"]


def find_pin(name: str, constraints: str) -> str:
    """Return the line of `constraints` that pins `name`, such as "torch==2.13.0"."""
    pins = [line.strip() for line in constraints.splitlines() if line.startswith(f"{name}==")]
    if len(pins) != 1:
        raise SetupError(f"The constraints pin {name} {len(pins)} times; they must once, as {name}==VERSION.")
    return pins[0]


def cuda_traces(python: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the parts of a CUDA build of PyTorch in the venv, or "". Imports none of them.

    torch declares CUDA in its version.py; the libraries of torchvision and torchaudio link to CUDA's runtime.
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

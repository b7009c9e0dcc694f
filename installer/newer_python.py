"""For a Python that is too old: runs setup.py again with a newer one, which uv fetches where there is none."""

import os
import shutil
import subprocess
import sys

# 3.11 first: the versions in constraints.txt were tested with it.
NAMES = ("python3.11", "python3.12", "python3.13")
FETCHED = "3.12"
# What uv and its Python go into, next to setup.py.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".uv")


def run_again(arguments):
    """Becomes `python3.11 ARGUMENTS`, or another newer one; returns a sentence if there is none."""
    verb, rest = arguments[1:2], {"--dry-run", "-h", "--help"} & set(arguments)
    python = find() or (fetch() if verb in (["install"], ["demo"], ["test"]) and not rest else None)
    if python is None:
        return (
            f"ComfyUI-TPU needs Python 3.11 or newer; this is Python {_version()} ({sys.executable}), and no newer one "
            "was found. Install one, for example with: sudo apt install python3.11 python3.11-venv"
        )
    os.execv(python, [python, *arguments])


def find():
    """The path of a Python that is new enough; None if there is none."""
    paths = [shutil.which(name) for name in NAMES]
    return next((path for path in paths if path and is_new_enough(path)), None)


def _version():
    return sys.version.split()[0]


def is_new_enough(path):
    """Whether it runs, too: pyenv has commands for versions that it was not told to use."""
    check = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.call(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def fetch():
    """The path of a Python that uv has, or downloads into FOLDER; uv itself comes from PyPI. None without a network."""
    uv, own = shutil.which("uv"), os.path.join(FOLDER, "uv", "bin", "uv")
    if uv is None:
        print(f"[setup] Python {_version()} is too old: uv, from PyPI, fetches {FETCHED} into {FOLDER}", flush=True)
        target = os.path.join(FOLDER, "uv")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "uv"]
        if not os.path.exists(own) and subprocess.call(pip):
            return None
        uv = own
    environment = dict(os.environ, UV_PYTHON_INSTALL_DIR=os.path.join(FOLDER, "python"))
    command = [uv, "run", "--no-project", "--python", FETCHED, "python", "-c", "import sys; print(sys.executable)"]
    try:
        python = subprocess.check_output(command, env=environment).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return python if os.path.exists(python) and is_new_enough(python) else None

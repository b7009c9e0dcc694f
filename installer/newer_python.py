"""Runs setup.py again with a newer Python if this one is too old; uv fetches one if none is installed."""

import os
import shutil
import subprocess
import sys

# 3.11 first: the versions in constraints.txt were tested with it.
NAMES = ("python3.11", "python3.12", "python3.13")
FETCHED = "3.12"
# Folder of uv and its Python, next to setup.py.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".uv")


def run_again(arguments):
    """Replace this process by `python3.11 ARGUMENTS` or another newer one; return a sentence if none is found."""
    verb, rest = arguments[1:2], {"--dry-run", "-h", "--help"} & set(arguments)
    python = find() or (fetch() if verb in (["install"], ["demo"], ["test"]) and not rest else None)
    if python is None:
        return (
            f"ComfyUI-TPU needs Python 3.11 or newer; this is Python {_version()} ({sys.executable}), and no newer one "
            "was found. Install one, for example with: sudo apt install python3.11 python3.11-venv"
        )
    os.execv(python, [python, *arguments])


def find():
    """Return the path of a Python that is new enough, or None."""
    paths = [shutil.which(name) for name in NAMES]
    return next((path for path in paths if path and is_new_enough(path)), None)


def _version():
    return sys.version.split()[0]


def is_new_enough(path):
    """Return whether it runs and is new enough: pyenv has commands for versions that are not enabled."""
    check = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.call(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def fetch():
    """Return the path of a Python that uv has, or downloads into FOLDER; None without a network. uv comes from PyPI."""
    uv, fetched = shutil.which("uv"), os.path.join(FOLDER, "uv", "bin", "uv")
    if uv is None:
        print(f"[setup] Python {_version()} is too old: uv, from PyPI, fetches {FETCHED} into {FOLDER}", flush=True)
        target = os.path.join(FOLDER, "uv")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "uv"]
        if not os.path.exists(fetched) and subprocess.call(pip):
            return None
        uv = fetched
    environment = dict(os.environ, UV_PYTHON_INSTALL_DIR=os.path.join(FOLDER, "python"))
    command = [uv, "run", "--no-project", "--python", FETCHED, "python", "-c", "import sys; print(sys.executable)"]
    try:
        python = subprocess.check_output(command, env=environment).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return python if os.path.exists(python) and is_new_enough(python) else None

"""For a Python that is too old: runs setup.py again with a newer one, or says how to come by one."""

import os
import shutil
import subprocess
import sys

# 3.11 first: the versions in constraints.txt were tested with it.
NAMES = ("python3.11", "python3.12", "python3.13", "python3.14")


def run_again(arguments):
    """Becomes `python3.11 ARGUMENTS`, or another newer one; returns a sentence if there is none."""
    python = find()
    if python is None:
        return sentence(uv=shutil.which("uv") is not None)
    os.execv(python, [python, *arguments])


def find():
    """The path of a Python that is new enough; None if there is none."""
    candidates = [shutil.which(name) for name in NAMES]
    uv = shutil.which("uv")
    if uv:
        command = [uv, "python", "find", "--no-project", ">=3.11"]
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        candidates.append(found.stdout.decode().strip())
    return next((path for path in candidates if path and is_new_enough(path)), None)


def is_new_enough(path):
    """Whether it runs, too: pyenv has commands for versions that it was not told to use."""
    check = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def sentence(uv):
    remedy = "uv python install 3.12" if uv else "sudo apt install python3.11 python3.11-venv"
    return (
        f"ComfyUI-TPU needs Python 3.11 or newer; this is Python {sys.version.split()[0]} ({sys.executable}), "
        f"and no newer one was found. Install one, for example with: {remedy}"
    )

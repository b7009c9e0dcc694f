"""Sets up ComfyUI-TPU: `install` for a TPU VM; the demo and the tests in `.venv` next to this file.

Standard library only. Build back ends execute this file too; it then calls setuptools, which reads pyproject.toml. It
changes no system Python, no pip configuration and no shell start-up file.
"""

import sys

BACKEND_COMMANDS = frozenset({"egg_info", "dist_info", "editable_wheel", "bdist_wheel", "sdist", "build", "develop"})


# Folders of the pack; all others are for the repository alone.
FOLDERS = ("attention", "cli", "diagnostics", "distributed", "kernels", "nodes", "sharding", "tpu_runtime")


def is_for_backend(arguments):
    """Return whether a build back end is calling: the first word is a setuptools command.

    Any Python asks this first: pip itself refuses one that is too old, by `requires-python`.
    """
    words = [argument for argument in arguments if not argument.startswith("-")]
    return bool(words) and words[0] in BACKEND_COMMANDS


if sys.version_info < (3, 11) and not is_for_backend(sys.argv[1:]):  # noqa: UP036 - older ones may start this file
    from installer import newer_python

    sys.exit(newer_python.run_again(sys.argv))

from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parent


def list_packages() -> list[str]:
    """Return the packages of the wheel: this folder as `comfyui_tpu`, and every folder of Python files below it."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return sorted({".".join(("comfyui_tpu", *file.parent.relative_to(ROOT).parts)) for file in files} | {"comfyui_tpu"})


def verbs() -> dict[str, Callable[[Sequence[str]], int]]:
    """Return the verbs of the command line. Imports them here: build back ends run without the installer's folder."""
    from installer import demo_and_tests, install, start, uninstall, update

    return {
        "install": install.main,
        "start": start.main,
        "update": update.main,
        "uninstall": uninstall.main,
        "demo": demo_and_tests.demo,
        "test": demo_and_tests.test,
    }


def usage() -> str:
    """Return the help."""
    lines = "\n".join(f"  {name:<10} {verb.__doc__}" for name, verb in verbs().items())
    return (
        f"usage: python3 setup.py VERB [ARGUMENTS]\n\n{lines}\n\n"
        f"install, start, update and uninstall have options: see --help. demo and test install into {ROOT / '.venv'}."
    )


def main(arguments: Sequence[str]) -> int:
    """Run a verb; return its exit code, 2 for an unknown verb."""
    from installer.terminal import SetupError

    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    verb = verbs().get(arguments[0])
    if verb is None:
        print(f"setup.py: {arguments[0]!r} is not one of {', '.join(verbs())}.\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return verb(arguments[1:])
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, missing rights
        print(f"\nsetup.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if is_for_backend(sys.argv[1:]):
        from setuptools import setup

        # By its name setuptools leaves this file out of the wheel, which holds no installer.
        setup(script_name="setup.py", packages=list_packages())
    else:
        sys.exit(main(sys.argv[1:]))

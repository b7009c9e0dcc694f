"""The program of a plan's process. It gets the options of `comfyui-tpu plan`, and answers in lines of JSON.

It is started by its path: ComfyUI's folder of the pack need not be installed, and may have any name.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "comfyui_tpu"


def main(arguments: Sequence[str]) -> None:
    say = _package_module("tpu_runtime.children").speaker()
    plan = _package_module("tpu_runtime.plan.plan")
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    try:
        say(report=plan.make_text(parser.parse_args(arguments), lambda line: say(line=line)))
    except (ValueError, RuntimeError, OSError) as error:
        say(error=str(error), is_users=isinstance(error, ValueError))


def _package_module(name: str) -> Any:
    """A module of the pack."""
    root = Path(__file__).parents[2]
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])
    return importlib.import_module(f"{PACKAGE}.{name}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The `comfyui-tpu` command where it is not installed, as with Manager: `python custom_nodes/comfyui-tpu doctor`.

Any Python can read this file far enough to report that it is too old.
"""

import importlib.util
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))

if sys.version_info < (3, 11):  # noqa: UP036 - an older one is where this file may start, and not where it stays
    sys.exit(f"ComfyUI-TPU needs Python 3.11 or newer; this is Python {sys.version.split()[0]} ({sys.executable})")

if not __package__:  # the folder was started by its path, and may have any name
    # Its own folders (nodes, fleet) would hide modules of these names.
    sys.path[:] = [place for place in sys.path if os.path.realpath(place or ".") != os.path.realpath(FOLDER)]
    _found = importlib.util.spec_from_file_location(
        "comfyui_tpu", os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER]
    )
    assert _found and _found.loader
    sys.modules[_found.name] = importlib.util.module_from_spec(_found)
    _found.loader.exec_module(sys.modules[_found.name])
    # A process that multiprocessing spawns runs this file again, by its path, and so knows the package too.
    __spec__ = None

if __name__ == "__main__":
    sys.exit(importlib.import_module(f"{__package__ or 'comfyui_tpu'}.cli.main").command())

"""`comfyui-tpu doctor`: each fault of a machine that can be found without starting its chips, with the command that
fixes it. May import everything the command may. `checks` is the table of what is said; the files of its `look`s see
nothing of the real machine but through a `Machine`.
"""

from .checks import add_arguments, report, run
from .machine import Machine, comfyui_folder, has_tpu

__all__ = ["Machine", "add_arguments", "comfyui_folder", "has_tpu", "report", "run"]

"""`comfyui-tpu doctor`: each fault of a machine that can be found without starting its chips, with the command that
mends it. May import everything the command may; a check is a function from a `Machine` to findings, and reads no more
of the real one.
"""

from .checks import add_arguments, report, run
from .machine import Machine, comfyui_folder, has_tpu

__all__ = ["Machine", "add_arguments", "comfyui_folder", "has_tpu", "report", "run"]

"""`comfyui-tpu doctor`: each fault of a machine that can be found without starting its chips, with the command that
fixes it. May import everything the command may; a check is a function from a `HostMachine` to findings, and reads no
more of the real one.
"""

from .checks import add_arguments, report, run
from .machine import HostMachine, comfyui_folder

__all__ = ["HostMachine", "add_arguments", "comfyui_folder", "report", "run"]

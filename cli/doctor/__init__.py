"""`comfyui-tpu doctor`: finds faults of a machine without starting its chips, with the command that fixes each.

May import everything the command may. A check is a function from a `HostMachine` to findings, and reads nothing else of
the real machine.
"""

from .checks import add_arguments, report, run
from .machine import HostMachine, comfyui_folder

__all__ = ["HostMachine", "add_arguments", "comfyui_folder", "report", "run"]

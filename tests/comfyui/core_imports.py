"""What `core_scripts` imports once for all scripts: ComfyUI on the CPU, and of our packages those that take seconds."""

import importlib
import sys

from comfyui_tpu.tests.comfyui import stubs  # noqa: F401 - it is put to use by its import
from comfyui_tpu.tests.support.comfyui_server import COMFYUI

sys.path.insert(0, str(COMFYUI))
sys.argv = [sys.argv[0], "--cpu"]

importlib.import_module("comfy.options").enable_args_parsing()
for name in (
    "comfy.sd", "nodes", "comfy_extras.nodes_custom_sampler", "comfyui_tpu.nodes.comfyui.core_model",
    "comfyui_tpu.nodes.comfyui.core_text_and_vae", "jax", "diffusers.models", "diffusers.schedulers",
):  # fmt: skip
    importlib.import_module(name)

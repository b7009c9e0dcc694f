"""Run in a process of its own: what is said of a picture in a prompt for text encoders that cannot see.

Arguments: ComfyUI's folder, and as JSON a file by the name of the model that it is the text encoder of. Prints the
sentences by model as JSON, last.
"""

import json
import sys


def main(comfyui: str, job: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfyui_tpu.nodes.comfyui.core_text_and_vae import can_take_images, check_tokens_before
    from comfyui_tpu.tests.support.messages import describe_error
    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef

    said = {}
    for name, file in json.loads(job).items():
        model = ModelRef(spec_name=name, model_id=file)
        process = check_tokens_before(lambda tokens, device: tokens, model, can_take_images(model))
        try:
            process([[1, {"type": "image"}]], None)
        except ValueError as error:
            said[name] = describe_error(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])

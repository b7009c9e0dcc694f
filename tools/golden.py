"""Write `tests/golden/`, every message of the server as the page shows it, with examples for its parameters.

    python tools/golden.py

Tests name messages by key, so that a new wording changes only these files: their difference is what to review. The
Chinese file is translated by the page's own code and needs Node.js.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from comfyui_tpu.tpu_runtime.messages import TABLE, Message, compose, compose_list, compose_term

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "golden"
LANGUAGES = ("en", *sorted(path.stem for path in TABLE.parent.glob("*.json") if path != TABLE))
SEPARATOR = "separator."
# Values of parameters by name, in any message. The others are their names in capitals.
EXAMPLES: dict[str, object] = {
    "title": "Wan 2.1 T2V 14B", "model_title": "Wan 2.2 I2V A14B", "titles": "Wan 2.1 T2V 14B and SkyReels V2",
    "family": "Wan21", "tpu_family": "Flux2", "source_family": "Flux2", "spec_name": "wan2.1-t2v-14b",
    "model_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "hub_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "id": "tiny/wan21",
    "path": "models/wan.safetensors", "file": "wan.safetensors", "file_name": "wan.safetensors",
    "folder": "transformer", "root": "models/wan", "class_name": "WanTransformer3DModel",
    "tensor_name": "blocks.0.attn1.to_q.weight",
    "source": "blocks.0.attn1.to_q.weight", "key": "num_layers", "other_key": "d_model", "shape": "(7, 5)",
    "actual_shape": "(1, 512, 60)", "expected_shape": "16, 3, 60, 104", "dtype": "I8", "method": "torchao",
    "count": 3, "value": 7, "low": 1, "high": 100, "near": 100, "multiple_of": 16, "plus": 1, "number": 2, "total": 6,
    "width": 832, "height": 480, "num_frames": 81, "frame_count": 5, "start_step": 6, "end_step": 2, "seconds": "1.5",
    "address": "10.0.0.2:8190", "port": 8190, "command": "comfyui-tpu serve", "strerror": "Permission denied",
    "error": "unexpected end of data", "error_type": "ValueError", "stage": "denoise", "num_devices": 8,
    "num_chips": 8, "size_bytes": "12.5 GiB", "free": "61.4", "size": "832x480", "precision": "bfloat16",
    "separator": " + ", "index": "model_index.json", "variable": "COMFYUI_TPU_HOSTS", "topology": "v6e:2x4",
    "node": "LoraLoader", "class_type": "KSampler", "node_id": 3, "label": "Load Diffusion Model (node 3)",
}  # fmt: skip


def render(language: str) -> dict[str, str]:
    """Return the message of each key, in one of `LANGUAGES`."""
    messages = {key: _compose_example(key) for key in _templates()}
    if language == "en":
        return {key: message[:] for key, message in messages.items()}
    return dict(zip(messages, _translate(language, list(messages.values())), strict=True))


def _templates() -> dict[str, str]:
    return json.loads(TABLE.read_text("utf-8"))


def _nested_examples() -> dict[str, dict[str, object]]:
    """Return the parameters of messages that are made of other messages."""
    rule = compose("settings.grid", multiple_of=4, plus=1, rule=compose("settings.between", low=1, high=241))
    problem = compose("settings.breaks_rule", value=80, rule=rule, nearest=compose_list(["77", "81"], "or"))
    advice = compose_list([compose("memory.fewer_frames", frames=41, num_frames=81, share="48 %")], "semicolon")
    part = compose("took.part", name=compose("took.loading"), seconds="1.0", pace="")
    return {
        "settings.input": {"name": compose_term("input", "num_frames"), "problem": problem},
        "settings.breaks_rule": {"value": 80, "rule": rule, "nearest": compose_list(["77", "81"], "or")},
        "settings.grid": {"rule": compose("settings.between", low=1, high=241)},
        "settings.multiple": {"rule": compose("settings.between", low=64, high=1920)},
        "memory.out_of_memory": {"advice": advice, "lifted": ""},
        "memory.program_does_not_fit": {
            "sentence": compose("memory.compiler_needs", needed="64.06", limit="31.25"),
            "advice": advice,
        },
        "program.result_not_finite": {
            "what": compose("sampling.latents_from_step", step=3, total=6),
            "cause": compose("program.cause_checkpoint"),
        },
        "compatibility.config_unsupported": {"state": compose("compatibility.has_value", value=30), "need": 40},
        "checkpoint.weight_not_floating_point": {"advice": compose("file.codes_unsupported")},
        "took.total_and_parts": {"total_s": "2.0", "texts": compose_list([part, part])},
        "multihost.lost": {"why": "it closed the connection", "last": compose("multihost.log_ended", log="reading")},
    }


def _compose_example(key: str) -> Message:
    if key.startswith(SEPARATOR):
        return compose_list(["FIRST", "SECOND"], key.removeprefix(SEPARATOR))
    own = _nested_examples().get(key, {})
    holes = re.findall(r"\{(\w+)\}", _templates()[key])
    return compose(key, **{name: own.get(name, EXAMPLES.get(name, name.upper())) for name in holes})


SCRIPT = """
import { readFile } from "node:fs/promises";
globalThis.fetch = async (url) => ({ ok: true, json: async () => JSON.parse(await readFile(url, "utf-8")) });
const { remember, speak, understood } = await import(process.argv[1]);
await speak(process.argv[2]);
const found = JSON.parse(await readFile("/dev/stdin", "utf-8"));
console.log(JSON.stringify(found.map((each) => (remember({ [each.text]: each }), understood(each.text)))));
"""


def _translate(language: str, messages: list[Message]) -> list[str]:
    module = (ROOT / "web" / "monitor" / "i18n.mjs").as_uri()
    command = [shutil.which("node") or "node", "--input-type=module", "-e", SCRIPT, module, language]
    described: list[Any] = [message.describe() for message in messages]
    ended = subprocess.run(command, input=json.dumps(described), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(ended.stdout)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for language in LANGUAGES:
        text = json.dumps(render(language), ensure_ascii=False, indent=1) + "\n"
        (FOLDER / f"messages_{language}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()

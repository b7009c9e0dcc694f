"""Write the example workflows and the translations of their notes.

- `examples/*.json`: as ComfyUI's page saves them, named by the title in its template browser.
- `examples/api/*.json`: for ComfyUI's API and for commands.
- `examples/pipeline/*.json`: with one node for all stages.
- `web/notes/*.json`: the lines of the notes in other languages.

A model's defaults are in its spec; an example adds what differs. Predicted times come from `benchmarks/predicted.json`:
if that changes, run this again, and then `thumbnails.py`.

Run: python tools/workflows.py
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Run as a file, this folder is where Python looks first.
import core_examples
import pages
from comfyui_tpu.nodes.declare import with_display_names
from comfyui_tpu.tools.locales import TRANSLATIONS, Table, Translate
from comfyui_tpu.tpu_runtime.models import published
from graphs import Example, LoraFile, api, pipeline, stages

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTES = ROOT / "web" / "notes"
LANGUAGES = ("zh",)
PREDICTED = ROOT / "benchmarks" / "predicted.json"


FOUR_K = "`num_frames` is 4k + 1: {} frames are 5 seconds at {} fps."
CHOOSE = "The image is in ComfyUI's `input` folder; choose one of your own. An image of another shape is cropped to "
CHOOSE += "the video's size. With `resize` fit it is shown in full, between bars."
DISTILLED = (
    "Two LoRAs distil the model, one for each expert. The page offers to download them. Or download them from "
    "`split_files/loras` of `Comfy-Org/Wan_2.2_ComfyUI_Repackaged` on the Hub to ComfyUI's `models/loras`, and "
    "reload the page.",
    "`guidance_scale` 1 and `guidance_scale_2` 1 use no negative prompt, which halves the work. These LoRAs tend to "
    "slow down motion. Guidance 2 to 3.5 for the first expert, or a strength below 1 for its LoRA, helps.",
    "Shift 5 with four steps gives the sigmas 1, 0.9375, 0.8333, 0.625: two steps for each expert.",
    "Without the LoRAs, four steps give a blurred video.",
)
FOUR_STEPS = {
    "num_inference_steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0, "seed": 0,
    "scheduler": "FlowMatchEulerDiscreteScheduler", "sigmas": "1, 0.75, 0.5, 0.25",
}  # fmt: skip
LIGHTNING = (
    "With a Lightning LoRA by lightx2v, use its number of steps, `guidance_scale` 1, `scheduler` "
    "FlowMatchEulerDiscreteScheduler and `flow_shift` 3."
)
WAN22 = "Wan_2.2_ComfyUI_Repackaged"
MINIATURE = (
    "The built-in tiny model of Wan 2.1, trained on coloured shapes. It uses the nodes and programs of the real "
    "model. It needs no download and, without a TPU, runs on the CPU."
)
SUNSET = "A beautiful sunset over the ocean"


def experts(name: str) -> tuple[LoraFile, ...]:
    """Return Wan 2.2's pair of files; `name` has a hole for the expert."""
    return tuple(LoraFile(name=name.format(expert), repo=WAN22, expert=expert) for expert in ("high", "low"))


ALL = (
    Example(
        name="try_it_now",
        title="TPU - try it now",
        model="wan2.1-t2v-14b",
        does="a first video on any machine",
        predicted=(),
        widgets={"num_inference_steps": 20, "seed": 3},
        is_miniature=True,
        tips=(
            "Press Run. The first run compiles for about a minute; later runs take seconds.",
            "It knows one or two shapes, circle, square or triangle, in black, blue, green, red, white or yellow, that "
            "move right, left, up or down, grow, shrink or turn: \"a yellow triangle moves up on black\", "
            "\"a yellow circle grows and a red triangle moves up on blue\". It does not know other words.",
            "The seed changes after each run, so that the next Run makes another video.",
            "The other templates run real models. Each lists its download, a TPU and the predicted time.",
        ),
    ),
    Example(
        name="wan21_t2v_720p",
        title="Wan 2.1 14B, text to video, 720p",
        prefix="wan21",
        model="wan2.1-t2v-14b",
        does="text to video",
        predicted=("wan2.1-t2v-14b",),
        widgets={"seed": 0},
        tips=("Use `flow_shift` 5 for 720p and 3 for 480p (832x480).", FOUR_K.format(81, 16)),
    ),
    Example(
        name="wan21_1.3b",
        title="Wan 2.1 1.3B, text to video",
        model="wan2.1-t2v-1.3b",
        does="text to video on one chip",
        predicted=("Wan 2.1 T2V 1.3B, 50 steps, v5e:1x1", "Wan 2.1 T2V 1.3B, 50 steps, v6e:1x1"),
        tips=(
            "1.3 billion parameters fit on one chip, such as those of free notebooks.",
            "The authors recommend 832x480, 50 steps, guidance 6 and shift 8.",
            FOUR_K.format(81, 16),
        ),
    ),
    Example(
        name="wan22_t2v_4step",
        title="Wan 2.2, text to video, 4 steps",
        model="wan2.2-t2v-a14b",
        does="text to video in 4 steps",
        predicted=("Wan 2.2 T2V, 4 steps, v6e:2x4",),
        widgets={**FOUR_STEPS, "flow_shift": 5.0},
        loras=experts("wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"),
        tips=DISTILLED,
    ),
    Example(
        name="wan22_i2v_720p",
        title="Wan 2.2, image to video, 720p",
        prefix="wan22_i2v",
        model="wan2.2-i2v-a14b",
        does="image to video",
        predicted=("wan2.2-i2v-a14b",),
        tips=(
            CHOOSE,
            "`guidance_scale` is for the first expert, which composes; `guidance_scale_2` for the second, which "
            "refines.",
            FOUR_K.format(81, 16),
        ),
    ),
    Example(
        name="wan22_i2v_4step",
        title="Wan 2.2, image to video, 4 steps",
        model="wan2.2-i2v-a14b",
        does="image to video in 4 steps",
        predicted=("Wan 2.2 I2V, 4 steps, v6e:2x4",),
        widgets=FOUR_STEPS,
        loras=experts("wan2.2_i2v_lightx2v_4steps_lora_v1_{}_noise.safetensors"),
        tips=(CHOOSE, *DISTILLED),
    ),
    Example(
        name="hunyuan15_t2v_720p",
        title="HunyuanVideo 1.5, text to video",
        prefix="hunyuan15",
        model="hunyuanvideo1.5-t2v-720p",
        does="text to video",
        predicted=("hunyuanvideo1.5-t2v-720p",),
        tips=(
            "Text in quotes in the prompt is drawn as letters.",
            "`flow_shift` 0 takes the checkpoint's own shift (720p: 9, 480p: 5).",
            "CFG-distilled checkpoints run without guidance and ignore `guidance_scale`.",
            FOUR_K.format(121, 24),
        ),
    ),
    Example(
        name="hunyuan15_i2v_720p",
        title="HunyuanVideo 1.5, image to video",
        prefix="hunyuan15_i2v",
        model="hunyuanvideo1.5-i2v-720p",
        does="image to video",
        predicted=("hunyuanvideo1.5-i2v-720p",),
        tips=(
            CHOOSE,
            "With separate stages, height, width and number of frames must be the same in the image encoder and the "
            "sampler.",
            "`flow_shift` 0 takes the checkpoint's own shift (720p: 7, 480p: 5).",
            FOUR_K.format(121, 24),
        ),
    ),
    Example(
        name="cogvideox_t2v_768p",
        title="CogVideoX 1.5 5B, text to video",
        prefix="cogvideox",
        model="cogvideox1.5-5b",
        does="text to video",
        predicted=("cogvideox1.5-5b",),
        tips=(
            "Made for 1360x768 with 16k + 1 frames: 81 are 5 seconds at 16 fps, 161 are 10. Other sizes run too: "
            "height and width are multiples of 16, `num_frames` is 8k + 1.",
            "The authors recommend `scheduler` CogVideoXDPMScheduler together with `use_dynamic_cfg`; this workflow "
            "uses the checkpoint's own.",
            "Long, detailed prompts work best, up to 226 tokens.",
        ),
    ),
    Example(
        name="flux2_t2i",
        title="FLUX.2 dev, text to image",
        prefix="flux2",
        model="flux2-dev",
        does="text to image",
        predicted=("flux2-dev",),
        tips=(
            "Height and width are multiples of 16; the model works best at 1024 x 1024.",
            "FLUX.2 dev uses no negative prompt: guidance is an input of the network, and a step costs the same at "
            "any `guidance_scale`.",
            "The repository is gated: accept its licence on the Hub and set `HF_TOKEN`, or use a local folder.",
        ),
    ),
    Example(
        name="flux2_turbo",
        title="FLUX.2 dev Turbo, text to image",
        model="flux2-dev",
        does="text to image in 8 steps",
        predicted=("FLUX.2 dev Turbo, 8 steps, v6e:2x4",),
        widgets={
            "num_inference_steps": 8, "guidance_scale": 2.5, "seed": 0,
            "sigmas": "1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031",
        },
        loras=(LoraFile(name="Flux2TurboComfyv2.safetensors", repo="flux2-dev"),),
        tips=(
            "A LoRA by fal distils the model. The page offers to download it. Or download it from "
            "`fal/FLUX.2-dev-Turbo` or `Comfy-Org/flux2-dev` on the Hub to ComfyUI's `models/loras`, and reload the "
            "page.",
            "`sigmas` are the authors' and already include the shift; guidance is 2.5.",
            "Without the LoRA, these eight steps give a poor image.",
        ),
    ),
    Example(
        name="flux2_klein",
        title="FLUX.2 klein 4B, text to image",
        model="flux2-klein-4b",
        does="text to image in 4 steps, on one chip",
        predicted=tuple(f"FLUX.2 klein 4B, 4 steps, {topology}" for topology in ("v5e:1x1", "v6e:1x1", "v6e:2x4")),
        prompt=SUNSET,
        tips=(
            "4 billion parameters and 4 steps: an image in seconds on one chip.",
            "The distilled model uses no guidance and no negative prompt. `black-forest-labs/FLUX.2-klein-base-4B` "
            "uses both: 50 steps, guidance 4.",
            "`black-forest-labs/FLUX.2-klein-9B` is larger and more detailed.",
        ),
    ),
    Example(
        name="z_image_turbo",
        title="Z-Image Turbo, text to image",
        model="z-image-turbo",
        does="text to image in 8 steps, on one chip",
        predicted=("Z-Image Turbo, 8 steps, v5e:1x1", "Z-Image Turbo, 8 steps, v6e:1x1", "z-image-turbo"),
        tips=(
            "Height and width are multiples of 16; the model works best at about one megapixel.",
            "Long, detailed prompts in English or Chinese work best, up to 512 tokens. The model can draw text.",
            "Turbo runs without guidance: `guidance_scale` 1. The base model, `Tongyi-MAI/Z-Image`, uses 28 to 50 "
            "steps, `guidance_scale` 4 to 6 and a negative prompt.",
        ),
    ),
    Example(
        name="qwen_image_2512",
        title="Qwen-Image 2512, text to image",
        model="qwen-image-2512",
        does="text to image, with text in the image",
        predicted=("qwen-image-2512",),
        tips=(
            "The authors' sizes: 1328x1328, 1664x928, 928x1664, 1472x1104, 1104x1472, 1584x1056, 1056x1584.",
            "It draws quoted text in a prompt, in English and Chinese. Prompts may have up to 1024 tokens.",
            LIGHTNING,
        ),
    ),
    Example(
        name="qwen_image_edit_2511",
        title="Qwen-Image Edit 2511",
        model="qwen-image-edit-2511",
        does="an image edited as the prompt says",
        predicted=("Qwen-Image Edit, 40 steps, v6e:2x4",),
        looks=True,
        tips=(
            "The image is in ComfyUI's `input` folder; choose one of your own. It may have any size and shape: the "
            "model sees it at about one megapixel. The sampler sets the size of the result.",
            "For more images, connect one image encoder's output to the next one's `condition`. The prompt refers "
            "to them as picture 1, picture 2 and so on. Up to three fit together with a prompt.",
            LIGHTNING,
        ),
    ),
)  # fmt: skip


# --- notes ------------------------------------------------------------------------------------------------------------


def records() -> dict[str, Any]:
    """Return the predictions by model or recipe."""
    found = json.loads(PREDICTED.read_text())
    return {record.get("recipe", record["model"]): record for record in found}


def predictions(example: Example) -> Iterator[dict[str, Any]]:
    """Yield the example's records. Raises ValueError for one of another size or recipe."""
    values, known = example.values, records()
    # Guidance that is an input of the network costs no time.
    guidance = ("guidance_scale",) if example.spec.recipe.guidance == "cfg" else ()
    names = ("height", "width", "num_frames", "num_inference_steps", *guidance)
    for key in example.predicted:
        if key not in known:
            raise ValueError(f"{example.name}: benchmarks/predicted.json has no {key}; it has {', '.join(known)}.")
        settings = known[key]["settings"]
        wrong = [name for name in names if name in values and settings[name] != values[name]]
        if wrong or known[key]["model"] != example.model:
            raise ValueError(f"{example.name}: {key} was predicted for another model or {', '.join(wrong)}.")
        yield known[key]


def seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def roughly(value: float) -> str:
    """Return a rounded time, so that a thumbnail need not be drawn again for every second."""
    return seconds(value) if value < 60 else f"{value / 60:.2g} min"


def memory(record: Mapping[str, Any]) -> str:
    """Return GiB per chip with everything loaded or, if that does not fit, of the largest stage."""
    gib, loaded = 2**30, record["residency_bytes"]
    if loaded <= record["chip"]["hbm_gib"] * gib:
        return f"{loaded / gib:.1f}"
    return f"{max(program['memory']['peak'] for program in record['programs']) / gib:.1f}, stage by stage"


def size(example: Example) -> str:
    """Return the size, such as "1280x720, 81 frames, 50 steps"."""
    values = example.values
    frames = "" if example.spec.is_image else f"{values['num_frames']} frames, "
    return f"{values['width']}x{values['height']}, {frames}{values['num_inference_steps']} steps"


def caption(example: Example) -> tuple[str, str, str]:
    """Return the text of a thumbnail: the title, the size, and the predicted time on the smallest TPU listed."""
    first = next(predictions(example), None)
    found = "no TPU and no download needed" if example.is_miniature else ""
    if first:
        chips = "1 chip" if first["chips"] == 1 else f"{first['chips']} chips"
        generation = first["topology"].partition(":")[0]
        found = f"{roughly(first['predicted_total_s'])} on {chips} of {generation}, predicted"
    return (example.title, size(example), found)


def weights(model: str) -> Iterator[str]:
    """Yield a line with the command that downloads a model's weights as files, and their sizes, smallest first."""
    if sizes := published.describe_sizes(model):
        command = f"comfyui-tpu download {model} --files {sizes.split()[0]}"
        yield f"`{command}` downloads its weights as files ({sizes}) and prints the `model_id` to choose."


def note(example: Example, translate: Translate = str) -> str:
    """Return the note as Markdown: predictions, then tips; `translate` is called for each line."""
    lines = about_miniature(example) if example.is_miniature else about_model(example)
    return "\n".join(translate(with_display_names(line)) for line in lines)


def about_miniature(example: Example) -> list[str]:
    return [f"**{example.title}**", "", MINIATURE, "", *(f"- {tip}" for tip in example.tips)]


def about_model(example: Example) -> list[str]:
    spec, rows = example.spec, list(predictions(example))
    lines = [f"**{spec.title}: {example.does}**", "", f"{size(example)}:", ""]
    if rows:
        lines += ["| TPU | chips | GiB per chip | predicted |", "|---|---|---|---|"]
        lines += [
            f"| {row['topology']} | {row['chips']} | {memory(row)} | {seconds(row['predicted_total_s'])} |"
            for row in rows
        ]
        lines += ["", "Predicted by the compiler, not measured. The first run of a size also compiles for minutes."]
    tips = [
        "**Without a TPU**, open the template `TPU - try it now`, or press Alt+Shift+Y (also in the TPU menu). It "
        "replaces the model with a built-in tiny model and needs no weights.",
        *example.tips,
        *weights(spec.name),
        "`model_id` may also be a local folder in diffusers layout.",
    ]
    return [*lines, "", *(f"- {tip}" for tip in tips)]


def translated(examples: Sequence[Example], language: str) -> dict[str, str]:
    """Return the translation of each line of the notes and of their title, by its English text."""
    known = Table(json.loads((TRANSLATIONS / f"{language}.json").read_text())["notes"])

    def translate(line: str) -> str:
        try:
            return known(line)
        except KeyError:
            return line

    pairs = [(note(one).split("\n"), note(one, translate).split("\n")) for one in examples]
    pairs.append((list(core_examples.LINES), [translate(line) for line in core_examples.LINES]))
    found = {english: other for lines in pairs for english, other in zip(*lines, strict=True) if english != other}
    return {pages.NOTE["title"]: translate(pages.NOTE["title"]), **found}


# --- files ------------------------------------------------------------------------------------------------------------


def files() -> dict[Path, str]:
    """Return the content of each file: the examples, and their notes in other languages."""
    found = {}
    for example in ALL:
        by_stage, as_one = stages(example), pipeline(example)
        found[EXAMPLES / "api" / f"{example.name}.json"] = _text(api(by_stage.workflow))
        graphs = (
            {example.title: by_stage}
            if example.is_miniature
            else {example.title: by_stage, f"pipeline/{example.name}": as_one}
        )
        for path, graph in graphs.items():
            name = f"{example.name}_pipeline" if graph is as_one else example.name
            found[EXAMPLES / f"{path}.json"] = _text(pages.page(name, graph, note(example)))
    for language in LANGUAGES:
        found[NOTES / f"{language}.json"] = _text(translated(ALL, language))
    return found


def _text(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for path, text in files().items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()

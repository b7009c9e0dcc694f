"""Stage files and their settings may come from anyone: they are read, or a sentence says why not."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.tests.properties.hostile import documents, ends_well, spoiled
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import conditioning, stage_files
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

SPEC = lookup_spec("wan2.1-t2v-14b")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id)
CONFIGS = {part.name: part.tiny for part in SPEC.components}
PLAN = DenoisingPlan.create(SPEC, SPEC.settings(), CONFIGS, SPEC.recipe.scheduler)
WIDTH = SPEC.component("transformer").tiny["text_dim"]
WHOLE = save(
    {
        "prompt_embeds": torch.rand(1, 4, WIDTH), "negative_prompt_embeds": torch.rand(1, 4, WIDTH),
        "latents": torch.rand(1, 16, 1, 2, 2), "condition.condition": torch.rand(1, 20, 1, 2, 2),
        "solver.solver": torch.zeros(32, dtype=torch.uint8), "solver.samples": torch.zeros(32, dtype=torch.uint8),
        "solver.begin": torch.tensor(0), "solver.step": torch.tensor(2), "solver.state": torch.rand(3, 16, 1, 2, 2),
        "solver.generator": torch.Generator().get_state(), "solver.origin": torch.rand(1, 16, 1, 2, 2),
    },
    metadata={"prompt_embeds.length": "3", "prompt_embeds.text_length": "3", "condition.height": "16"},
)  # fmt: skip
SIZE = int.from_bytes(WHOLE[:8], "little")


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + WHOLE[8 + SIZE :]


FILES = st.one_of(
    documents(json.loads(WHOLE[8 : 8 + SIZE])).map(with_header),
    documents(json.loads(WHOLE[8 : 8 + SIZE])).map(with_header),
    spoiled(WHOLE),
    st.binary(max_size=64),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is imported and computed at the first use is no file's time."""
    found = tmp_path_factory.mktemp("hostile")
    for name in (stage_files.EMBEDDINGS, stage_files.LATENTS):
        (found / name).write_bytes(WHOLE)
    with contextlib.suppress(ValueError):
        use(found)
    return found


def use(folder: Path) -> None:
    """All that is read of a folder before the first program runs."""
    embeds = stage_files.load_embeddings(folder, MODEL)
    condition, latents = stage_files.load_condition(folder, MODEL), stage_files.load_latents(folder, MODEL)
    conditioning.build_denoiser_inputs(PLAN, *embeds, condition)
    conditioning.get_latent_samples(SPEC, latents)


@settings(max_examples=250)
@given(content=FILES)
def test_load_stage_file_arbitrary_bytes_fail_cleanly(folder: Path, content: bytes):
    for name in (stage_files.EMBEDDINGS, stage_files.LATENTS):
        (folder / name).write_bytes(content)
    ends_well(lambda: use(folder), len(content))
    ends_well(lambda: stage_files.check_ownership(folder), len(content))


CONFIG = {
    "model_name": SPEC.name, "model_id": SPEC.miniature.random_id, "prompt": "a red circle", "negative_prompt": "",
    "height": 80, "width": 80, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 5.0,
    "flow_shift": 3.0, "seed": 1, "sigmas": "1, 0.5", "scheduler": "checkpoint", "fps": 16.0, "add_noise": True,
}  # fmt: skip


@settings(max_examples=80)
@given(content=documents(CONFIG), verb=st.sampled_from(["denoise", "decode"]))
def test_cli_stage_commands_arbitrary_config_fail_cleanly(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, verb: str
):
    """Without stage files: what the settings let through ends there."""
    folder = tmp_path_factory.getbasetemp() / "settings"
    folder.mkdir(exist_ok=True)
    (folder / stage_files.CONFIG).write_bytes(content)
    ends_well(lambda: cli.main([verb, "--debug", "--folder", str(folder)]) == 2 or pytest.fail("it ran"), len(content))

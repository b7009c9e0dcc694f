"""`comfyui-tpu download`: only what is loaded, said before, going on where it stopped, whole or not there."""

import shutil
from pathlib import Path

import jax
import pytest
from comfyui_tpu.cli.doctor import machine as doctor
from comfyui_tpu.cli.download import BarContext, format_bar
from comfyui_tpu.cli.main import main
from comfyui_tpu.tests.support.fake_hub import Answer, FakeHub
from comfyui_tpu.tests.support.host import Runner, new_prompt
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import downloads, hub, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC, TI2V = lookup_spec("wan2.1-t2v-14b"), lookup_spec("wan2.2-ti2v-5b")
ENCODER, DENOISER = "model.safetensors", "diffusion_pytorch_model-00002-of-00004.safetensors"
# Weights in another format, documents, and a shard of the VAE's encoder, which makes no video from text.
UNUSED = {
    "README.md", "wan.safetensors", "assets/picture.png", "transformer/diffusion_pytorch_model.bin",
    "vae/diffusion_pytorch_model-00001-of-00003.safetensors",
}  # fmt: skip
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"


@pytest.fixture
def fake(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """A hub with the built-in checkpoint as a model by its own id, beside what is never loaded."""
    folder = tmp_path / "published"
    shutil.copytree(tiny.ensure_random(SPEC), folder)
    for path in (folder / name for name in UNUSED):
        path.parent.mkdir(exist_ok=True)
        path.exists() or path.write_text("x")
    server.use(monkeypatch, tmp_path / "hf", {SPEC.published.hub_id: folder})
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    return server


def final_names(folder: Path) -> set[str]:
    """What lies in a folder under its final name."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if path.parts[0] != ".cache" and path.suffix != ".part"}


def encode_prompt(prompt: str, model_id: str) -> list[float]:
    model = ModelRef(spec_name=SPEC.name, model_id=model_id, precision="float32")
    model.check()
    return Runner(jax.devices()[:1]).encode(model, prompt, "", SilentProgress())[0][0][0].flatten().tolist()


def test_download_to_folder_fetches_needed_files_only(
    fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    to = tmp_path / "models" / "wan"
    assert main(["download", SPEC.name, "--to", str(to)]) == 0
    assert final_names(to) == set(fake.files(SPEC.published.hub_id)) - UNUSED
    out = capsys.readouterr().out
    assert f"Wan 2.1 T2V 14B: {SPEC.published.hub_id}, to {to}\n  part          files" in out
    assert f"complete: Wan 2.1 T2V 14B; model_id is {to}" in out
    assert not (tmp_path / "hf").exists(), "the Hub's cache was written to"
    prompt = new_prompt()
    assert encode_prompt(prompt, str(to)) == encode_prompt(prompt, SPEC.miniature.random_id)
    # Again: all is there, and no weight is asked for.
    fake.asked.clear()
    assert main(["download", SPEC.name, "--to", str(to)]) == 0
    assert not fake.weights() and "to download: 0.0 MiB" in capsys.readouterr().out


def test_doctor_download_bytes_counts_missing_without_weights(fake: FakeHub):
    missing, total = doctor.download_bytes(SPEC.name)
    sizes = [path.stat().st_size for path in fake.repositories[SPEC.published.hub_id].rglob("*.safetensors")]
    assert 0 < missing == total < sum(sizes) and not fake.weights()
    assert main(["download", SPEC.name]) == 0
    assert doctor.download_bytes(SPEC.name) == (0, total)


def test_download_without_folder_fills_hub_cache(fake: FakeHub, monkeypatch: pytest.MonkeyPatch):
    """By a name, and by the id of somebody's copy, whose family its index says."""
    fake.repositories["owner/ti2v"] = tiny.ensure_random(TI2V)
    for model in (SPEC.name, "owner/ti2v"):
        assert main(["download", model]) == 0
    gets = [line for line in fake.asked if line.startswith("GET") and "/resolve/" in line]
    assert len(gets) == len(set(gets)), "a file was fetched twice"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for spec, model_id in ((SPEC, SPEC.published.hub_id), (TI2V, "owner/ti2v")):
        found = ModelRef(spec_name=spec.name, model_id=model_id).locate()
        assert all(found.local_weight_files(component) for component in spec.components), model_id


@pytest.mark.parametrize("own", [False, True], ids=["cache", "folder"])
def test_download_resumes_after_interrupted_connection(
    fake: FakeHub, tmp_path: Path, own: bool, capsys: pytest.CaptureFixture[str]
):
    """At once where the connection comes back; else what came is kept for the next call, under no final name."""
    to = tmp_path / "wan"
    command = ["download", SPEC.name, *(["--to", str(to)] if own else [])]
    fake.cuts[ENCODER] = [1000]
    fake.cuts[DENOISER] = [2000] + [0] * downloads.MAX_RETRIES
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "transformer of Wan-AI/Wan2.1-T2V-14B-Diffusers is not on this machine, or is incomplete" in said
    assert (ENCODER, "1000") in fake.ranges
    parts = list((to if own else tmp_path / "hf").rglob("*.part"))
    assert 2000 in [part.stat().st_size for part in parts] and not list(tmp_path.glob(f"wan/**/{DENOISER}"))
    fake.ranges.clear()
    assert main(command) == 0
    assert (DENOISER, "2000") in fake.ranges and not list(tmp_path.rglob("*.part"))
    assert ENCODER not in [name for name, _ in fake.ranges]


def test_download_after_cancel_completes_on_next_call(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while the bytes come; after the next call they are the Hub's."""

    def interrupt(self: BarContext, *_: object) -> None:
        raise KeyboardInterrupt

    to = tmp_path / "wan"
    with monkeypatch.context() as patched:
        patched.setattr(BarContext, "step", interrupt)
        assert main(["download", SPEC.name, "--to", str(to)]) == 130
    assert main(["download", SPEC.name, "--to", str(to)]) == 0
    for name in final_names(to):
        assert (to / name).read_bytes() == (fake.repositories[SPEC.published.hub_id] / name).read_bytes(), name


def test_download_damaged_part_is_deleted(fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    to = tmp_path / "wan"
    fake.cuts[DENOISER] = [2000] + [0] * downloads.MAX_RETRIES
    main(["download", SPEC.name, "--to", str(to)])
    part = to / "transformer" / f"{DENOISER}.part"
    part.write_bytes(bytes(2000))
    assert main(["download", SPEC.name, "--to", str(to)]) == 2
    said = capsys.readouterr().err
    assert "arrived damaged (transformer/diffusion_pytorch_model-00002-of-00004.safetensors of" in said
    assert not part.exists() and not (to / "transformer" / DENOISER).exists()


def test_download_on_full_disk_fails_before_weights(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(hub, "free_bytes", lambda folder: 2**16)
    assert main(["download", SPEC.name, "--to", str(tmp_path / "wan")]) == 2
    out, err = capsys.readouterr()
    assert "free on the disk: 0.1 MiB" in out
    assert "The disk is too full: Wan-AI/Wan2.1-T2V-14B-Diffusers needs" in err and "Free" in err
    assert not fake.weights()
    # The nodes look first too.
    model = ModelRef(spec_name=SPEC.name, model_id=SPEC.published.hub_id)
    with raises_message(ValueError, "hub.disk_too_full", what=Expected("hub.file_of_model", name="transformer")):
        model.locate().fetch_weights(SPEC.component("transformer"), SilentProgress())
    assert not fake.weights()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("wan3", "there is no model 'wan3'; there are:\n  wan2.1-t2v-14b\n"),
        ("tiny/wan21", "tiny/wan21 is built in: nothing has to be downloaded."),
        ("owner/unknown", "owner/unknown was not found on the Hugging Face Hub, or it is private."),
        ("owner/other", "owner/other is a StableDiffusionPipeline, which is not supported; supported are WanPipeline,"),
    ],
)
def test_download_unusable_model_prints_error(
    fake: FakeHub, tmp_path: Path, model: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    fake.repositories["owner/other"] = tmp_path / "other"
    assert main(["download", model]) == 2
    assert sentence in capsys.readouterr().err


def test_download_gated_model_explains_access_without_token(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fake.answers["/resolve/"] = Answer(status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": TOKEN})
    assert main(["download", SPEC.name]) == 2
    out, err = capsys.readouterr()
    for word in (
        f"https://huggingface.co/{SPEC.published.hub_id}",
        "huggingface.co/settings/tokens",
        "hf auth login",
        "HF_TOKEN",
    ):
        assert word in err
    assert TOKEN not in out + err


def test_download_to_foreign_folder_leaves_it_unchanged(
    fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The folder of all models instead of one in it, and another model's."""
    (tmp_path / "diffusers" / "mine").mkdir(parents=True)
    assert main(["download", SPEC.name, "--to", str(tmp_path / "diffusers")]) == 2
    said = capsys.readouterr().err
    assert f"Choose a folder of its own, such as {tmp_path}/diffusers/Wan2.1-T2V-14B-Diffusers." in said
    assert [path.name for path in (tmp_path / "diffusers").iterdir()] == ["mine"]


def test_format_bar_shows_amount_rate_and_time_left():
    assert format_bar(512, 2048, 256, 2.0) == "[######..................] 0.5 GiB of 2.0 GiB, 128 MiB/s, 0:12 left"
    assert format_bar(0, 2048, 0, 0.0) == "[........................] 0.0 MiB of 2.0 GiB"


def test_hub_progress_bar_reports_mib_and_can_be_cancelled():
    class Cancelled(Exception):
        pass

    class Host(SilentProgress):
        cancelled = False
        shown: list = []

        def text(self, message: str) -> None:
            self.shown.append(message)

        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            self.shown.append((done, total, unit))

        def check_cancelled(self) -> None:
            if self.cancelled:
                raise Cancelled

    host = Host()
    bar = hub._bar(host)(total=8 * 2**20, unit="B")
    bar.update(3 * 2**20)
    assert host.shown == [(3, 8, "MiB")]
    host.cancelled = True
    with pytest.raises(Cancelled):
        bar.update(1)

"""`comfyui-tpu selftest`: green on 8 simulated chips, and red, with the place named, for each kind of fault."""

import argparse
import getpass
import io
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.attention import local
from comfyui_tpu.cli import selftest
from comfyui_tpu.cli.main import main
from comfyui_tpu.diagnostics.selftest import checks, chips, families, kernels
from comfyui_tpu.diagnostics.selftest import run as running
from comfyui_tpu.diagnostics.selftest.checks import Check, Tolerance
from comfyui_tpu.diagnostics.selftest.report import HIDDEN, redact_report
from comfyui_tpu.kernels import attention_kernel, convolution
from comfyui_tpu.sharding.rules import REPLICATED, Rule
from comfyui_tpu.tpu_runtime import models
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.engine import stage_context
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from rich.console import Console

MODEL = "cogvideox1.5-5b"


@dataclass(frozen=True)
class Ran:
    status: int
    text: str
    record: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return json.loads(self.record)["rows"]


def run_selftest(folder: Path, *models: str) -> Ran:
    """The command, with its text and its record."""
    path, stream = folder / "report.json", io.StringIO()
    options = argparse.Namespace(model=list(models), report=path, first_run=False, one_process=False, quick=False)
    status = selftest.run(options, Console(file=stream, width=160))
    return Ran(status, stream.getvalue(), path.read_text())


def wrong(ran: Ran) -> list[str]:
    return [f"{row['family']}: {row['stage']}" for row in ran.rows if row["verdict"] != "ok"]


def one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attention kernel's forms one: `tests/attention` has the others, and this is to be quick."""
    monkeypatch.setattr(kernels, "HEAD_SIZES", (64,))
    monkeypatch.setattr(kernels, "FORMS", kernels.FORMS[:1])


@pytest.mark.slow
def test_selftest_on_eight_chips_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one_form(monkeypatch)
    # A program that an earlier test has stored would not be traced.
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    used = mock.Mock(wraps=local.attend_with_kernel)
    monkeypatch.setattr(local, "attend_with_kernel", used)
    found = run_selftest(tmp_path, MODEL)
    record = json.loads(found.record)
    assert found.status == 0, found.text
    assert len(record["chips"]) == len(jax.devices()) == 8
    stages = [(row["family"], row["stage"]) for row in found.rows]
    title = "CogVideoX 1.5 5B"
    assert stages == [
        ("chips", "devices"), ("chips", "transfers"), ("chips", "exchange"), ("chips", "products"),
        ("kernels", "attention, bounded scores, heads of 64"), ("kernels", "norm and rotation, heads of 64"),
        ("kernels", "residual norm"), ("kernels", "int8 linear layers"),
        ("kernels", "convolution"), ("kernels", "modulation"),
        (title, "reference on the host"), (title, "text states"), (title, "first step"),
        (title, "last step"), (title, "frames"), (title, "weights"),
    ]  # fmt: skip
    assert all(row["error"] <= row["bound"]["error"] / 4 for row in found.rows if row["bound"])
    assert any(row["error"] for row in found.rows if row["family"] == title)  # not compared with itself
    assert used.call_count > 1  # in the denoiser too
    assert found.text.splitlines()[-1].startswith("Green: all 16 checks on 8 x cpu are within their bounds")
    assert not leaks(found.record, tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_selftest_detects_flipped_weight_on_one_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sign of one of 10 368 values, after loading."""
    name, whole = "transformer_blocks.*.attn1.to_q.weight", weight_loader.load_weights

    def flipped(*args: Any) -> dict[str, jax.Array]:
        weights = whole(*args)
        if name in weights and len(weights[name].sharding.device_set) == 8:
            array = weights[name]
            parts = [np.array(shard.data) for shard in array.addressable_shards]
            parts[3].flat[np.abs(parts[3]).argmax()] *= -1
            placed = [jax.device_put(x, shard.device) for x, shard in zip(parts, array.addressable_shards, strict=True)]
            weights[name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
        return weights

    monkeypatch.setattr(stage_context.weight_loader, "load_weights", flipped)
    monkeypatch.setattr(kernels, "checks", lambda *args: ())
    found = run_selftest(tmp_path, MODEL)
    assert found.status == 1
    assert wrong(found) == [f"CogVideoX 1.5 5B: {stage}" for stage in ("first step", "last step", "weights")]
    assert f"of transformer's {name} on chip 3 differ from the host's" in found.text
    assert found.text.splitlines()[-1].startswith("Red: 3 of 10 checks on 8 x cpu failed: CogVideoX 1.5 5B: first step")


@pytest.mark.slow
def test_selftest_detects_wrongly_replicated_weight(monkeypatch: pytest.MonkeyPatch):
    """FLUX.2's output projections, whose rows a chip takes for its own: on one chip nothing is wrong."""
    spec = lookup_spec("flux2-dev")
    part, pattern = spec.component("transformer"), "single_transformer_blocks.*.attn.out"
    rules = tuple(Rule(pattern, REPLICATED) if rule.pattern == pattern else rule for rule in part.rules)
    assert rules != part.rules
    components = tuple(replace(part, rules=rules) if one is part else one for one in spec.components)
    changed = replace(spec, components=components)
    monkeypatch.setattr(models, "SPECS", tuple(changed if one is spec else one for one in models.SPECS))
    text = torch.randn(1, 512, 120, generator=torch.Generator().manual_seed(0))
    texts = [[text, {"tpu_family": "Flux2", "length": 512}]], None
    # As on a TPU machine the reference's device is not JAX's first one.
    settings, host = families.make_settings(changed), families.make_engine(jax.devices()[7:])
    estimates = families.Estimates(SilentProgress())
    latents = families._denoise(host, families._model(changed, "float32"), settings, texts, None, estimates)
    reference = families.Generation(
        texts=texts, condition=None, estimates=estimates.kept, latents=latents, frames=torch.zeros(1)
    )
    steps = families._stages(changed, settings, reference, host, families.make_engine(jax.devices()[:2]), "float32")
    row = next(checks.run_check(check, SilentProgress()) for check in steps if check.stage == "first step")
    assert row.title == "FLUX.2 dev: first step (float32)" and not row.is_good
    assert row.error is not None and row.error > 100 * families.TIGHT.error


@pytest.mark.parametrize(
    ("more", "problem"), [(1, "values of attention are not finite"), (-1, "The largest error is")], ids=str
)
def test_selftest_detects_attention_mask_off_by_one(more: int, problem: str, monkeypatch: pytest.MonkeyPatch):
    def valid(self: attention_kernel.KeyChunk, shape: tuple[int, ...], axis: int = 0) -> jax.Array:
        keys = jax.lax.broadcasted_iota(jax.numpy.int32, shape, axis)
        return keys < self.part.length - self.start + more

    monkeypatch.setattr(attention_kernel.KeyChunk, "valid", valid)
    row = checks.run_check(next(iter(kernels.checks(*jax.devices()[:2]))), SilentProgress())
    assert row.title == "kernels: attention, bounded scores, heads of 64 (float32)"
    assert problem in row.problem


def test_selftest_detects_mirrored_convolution_weights(monkeypatch: pytest.MonkeyPatch):
    """As they are they are green, above."""
    arranged = convolution._arrange
    (check,) = (check for check in kernels.checks(*jax.devices()[:2]) if check.stage == "convolution")
    # Without a kept trace, which would be of the kernel as it is, or be kept of the wrong one.
    monkeypatch.setattr(convolution, "_convolve_on_mesh", convolution._convolve_on_mesh.__wrapped__)
    monkeypatch.setattr(convolution, "_arrange", lambda weight, bias, mib: arranged(weight[..., ::-1], bias, mib))
    assert "The largest error is" in checks.run_check(check, SilentProgress()).problem


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ("transfers", "Chip 0 returns 1 of 4194304 words changed."),
        ("exchange", "The sum over all is wrong on chip 3."),
        ("products", "A product of matrices is wrong on chip 3."),
    ],
)
def test_selftest_names_chip_with_wrong_memory_or_results(stage: str, problem: str, monkeypatch: pytest.MonkeyPatch):
    def altered(array: jax.Array) -> np.ndarray:
        read = np.array(array)
        read[3] += 1
        return read

    monkeypatch.setattr(chips, "_read", altered)
    groups = (chips.check_devices, chips.check_transfers, chips.check_collectives)
    (check,) = (check for group in groups for check in group(jax.devices()) if check.stage == stage)
    assert checks.run_check(check, SilentProgress()).problem == problem


# --- the verdict ------------------------------------------------------------------------------------------------------

ONE = {"x": np.linspace(-2, 2, 101, dtype=np.float32)}


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (ONE["x"], ""),
        (ONE["x"] + 1e-3 * (np.arange(101) == 40), ""),
        (ONE["x"] + 1e-2 * (np.arange(101) == 40), "The largest error is 5.0e-03 of the largest value"),
        (ONE["x"] * 1.0005, "Everything is 5.0e-04 too large."),
        (np.where(np.arange(101) == 7, np.nan, ONE["x"]), "1 of 101 values of x are not finite."),
        (ONE["x"][:100], "x has shape (100,) instead of (101,)."),
        (ONE["x"] * 0, "The largest error is 1.0e+00"),
    ],
)
def test_compare_arrays_describes_problem(ours: np.ndarray, problem: str):
    found = checks.compare_arrays({"x": ours}, ONE, Tolerance(error=1e-3, slope=1e-4))[2]
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_compare_arrays_requires_equal_lengths_and_names():
    bound = Tolerance(error=1.0, slope=1.0)
    assert checks.compare_arrays({"length": 7}, {"length": 8}, bound)[2] == "length is 7 instead of 8."
    assert checks.compare_arrays({"a": 1.0}, {"b": 1.0}, bound)[2] == "There are a instead of b."


# --- the command ------------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "Q" * 34
SECRETS = ("/mnt/disks/data/model.safetensors", "10.128.0.7", "anna@example.com", "t1v-n-8a5e-w-0.europe.internal")


def leaks(text: str, *paths: Path) -> list[str]:
    """What of this machine and its user is in `text`."""
    names = {socket.gethostname(), getpass.getuser()}
    found = [str(one) for one in (*paths, Path.home(), TOKEN, *SECRETS) if str(one) in text]
    return found + [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def faulty(error: BaseException) -> Any:
    """Checks of which the second raises `error`."""

    def raises(progress: Any) -> None:
        raise error

    def given(*args: Any) -> Iterator[Check]:
        for name, run in (("first", lambda progress: None), ("second", raises), ("third", lambda progress: None)):
            yield Check(family="fake", stage=name, precision="", run=run)

    return given


def test_selftest_continues_after_error_and_redacts_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    where = f"{getpass.getuser()} on {socket.gethostname()}"
    said = f"cannot read {Path.home()}/weights ({', '.join(SECRETS)}) with {TOKEN} and secret-token, {where}"
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_force_host_platform_device_count=8")
    monkeypatch.setattr(running, "checks", faulty(OSError(said)))
    found = run_selftest(tmp_path)
    assert found.status == 1
    assert [row["verdict"] for row in found.rows] == ["ok", "wrong", "ok"]
    assert found.rows[1]["problem"].startswith("OSError: cannot read ***")
    assert not leaks(found.record, tmp_path) and "secret-token" not in found.record
    assert "secret-token" not in found.text and TOKEN not in found.text
    record = json.loads(found.record)
    assert record["settings"]["XLA_FLAGS"] == "--xla_dump_to=*** --xla_force_host_platform_device_count=8"
    assert {"python", "jax", "torch"} <= set(record["versions"]) and record["chips"][7]["id"] == 7
    assert found.text.splitlines()[-1] == "Red: 1 of 3 checks on 8 x cpu failed: fake: second."


def test_selftest_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(running, "checks", faulty(KeyboardInterrupt()))
    assert main(["selftest"]) == 130
    assert capsys.readouterr().err == "comfyui-tpu: cancelled\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--model", "nothing"], "there is no model 'nothing'; there are:\n  wan2.1-t2v-14b\n"),
        (["--report", "/no/such/folder/x.json"], "it must be a file in a folder that exists."),
    ],
)
def test_selftest_invalid_argument_is_refused_before_run(words: list[str], problem: str, capsys: pytest.CaptureFixture):
    assert main(["selftest", *words]) == 2
    assert problem in capsys.readouterr().err


def test_host_device_without_cpu_backend_error_names_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=RuntimeError("Unknown backend cpu")))
    with pytest.raises(RuntimeError, match="Unset it, or set JAX_PLATFORMS=tpu,cpu."):
        running.host_device()


@pytest.mark.parametrize(
    "secret",
    [
        "/home/jo doe/my models/wan.safetensors", "'/srv/big disk/models of jo'", "~/my pictures/cat.png", "./here/x",
        "file:///home/jo/x", "file:/home/jo/x", "file://server/share/x", "https://jo:secret@hub.example/x?token=abc",
        "gs://jo-bucket/x", r"C:\\Users\\jo\\models", "10.1.2.3", "10.1.2.3:8476", "2001:db8::1", "fe80::1%eth0", "::1",
        "[2001:db8:0:0:1:2:3:4]:8476", "::ffff:10.1.2.3", "jo@example.com", "jo@workstation", "tpu-vm-7.c.jo.internal",
    ],
)  # fmt: skip
def test_redact_report_hides_paths_addresses_and_names(secret: str):
    found = redact_report(f"It ended at {secret}, after step 3")
    assert HIDDEN in found and found.startswith("It ended at ") and found.endswith("after step 3"), found
    left = found.removeprefix("It ended at ").removesuffix(", after step 3")
    assert not set(re.findall(r"\w+", secret)) & set(re.findall(r"\w+", left)) - {"8476", "models", "of"}, found


@pytest.mark.parametrize(
    "text",
    [
        "3/8 chips, 12:30:05, bfloat16/float32: largest error 1.2e-3 of 2.94", "v6e:2x4 at step 3 of 50", "a and/or b",
        "jax 0.10.2 differs", "denoise_step: 0.5 GiB/s",
    ],
)  # fmt: skip
def test_redact_report_keeps_other_text(text: str):
    assert redact_report(text) == text

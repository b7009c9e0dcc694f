"""The versions that requirements.txt claims, and what is said of others."""

import importlib.metadata
import logging
import sys
from pathlib import Path

import pytest
from comfyui_tpu.cli.doctor import HostMachine, checks, packages
from comfyui_tpu.tpu_runtime import versions
from packaging.version import Version

# What results, file formats and programs depend on.
BOUNDED = ("jax", "torchax", "diffusers", "transformers", "safetensors", "huggingface-hub", "av", "tpu-info")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that count as installed in place of the real ones, by package."""
    others: dict[str, str] = {}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: others.get(name) or real(name))
    return others


def findings(topic: str) -> list[tuple[str, str]]:
    return [(each.found, each.remedy) for each in packages.versions_here(HostMachine()) if each.topic == topic]


@pytest.mark.parametrize("name", BOUNDED)
def test_the_range_ends_with_the_version_that_is_pinned(name: str):
    """A later minor version was not run, so it is not claimed."""
    ranges = {package.name: package.range for package in versions.packages()}
    pins = {pin.name: pin.specifier for pin in versions.requirements(versions.ROOT / "constraints.txt")}
    (pin,) = pins[name]
    newest = Version(pin.version)
    assert ranges[name].contains(newest)
    assert not ranges[name].contains(f"{newest.major}.{newest.minor + 1}.0")
    assert {bound.operator for bound in ranges[name]} in ({">=", "<"}, {"=="})


def test_every_version_of_this_environment_was_run():
    installed = {package: package.installed for package in versions.packages()}
    assert [package.name for package, version in installed.items() if version and package.doubt(version)] == []


@pytest.mark.parametrize(
    ("name", "version", "tested", "command"),
    [
        ("transformers", "4.57.6", "<5.25,>=5.6.0", "pip install 'transformers<5.25,>=5.6.0'"),
        ("jax", "0.11.0", "<0.11,>=0.10.2", "pip install 'jax[tpu]<0.11,>=0.10.2'"),
        ("libtpu", "0.0.50", "==0.0.42.*", "pip install 'jax[tpu]<0.11,>=0.10.2'"),
        ("torch", "2.12.1+cpu", "==2.13.0", f"pip install --index-url {versions.TORCH_INDEX} torch==2.13.0"),
    ],
)
def test_doctor_names_a_version_that_was_not_run_and_the_command(
    name: str, version: str, tested: str, command: str, installed: dict[str, str]
):
    assert findings(name)[0][1] == ""
    installed[name] = version
    assert findings(name) == [(f"{version}; tested with {tested}", command)]


def test_a_newer_version_of_what_comfyui_brings_is_no_fault(installed: dict[str, str]):
    """ComfyUI's requirements bring the newest there is: an installation by the book must end well."""
    installed["transformers"] = "5.25.1"
    (found,) = [each for each in packages.versions_here(HostMachine()) if each.topic == "transformers"]
    assert not found.is_fault and found.remedy == "pip install 'transformers<5.25,>=5.6.0'"
    assert found.found.startswith("5.25.1; newer than what was tested, <5.25,>=5.6.0")


def test_doctor_reports_without_packaging(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    for module in ("cli.doctor.packages", "tpu_runtime.versions"):
        monkeypatch.setitem(sys.modules, f"comfyui_tpu.{module}", None)
    topics = [each.topic for each in checks.report(HostMachine())]
    assert topics[:3] == ["comfyui-tpu", "Python", "packaging"] and "devices" in topics and "torch" not in topics


def test_a_comfyui_that_asks_for_versions_never_run_is_named(tmp_path: Path):
    file = tmp_path / "requirements.txt"
    machine = HostMachine(environ={"COMFYUI_PATH": str(tmp_path)})
    file.write_text("transformers>=4.50.3\nsafetensors>=0.4.2\ntorch\ntqdm\nav>=16.0.0\nnumpy>=1.25.0\nother==1\n")
    assert list(packages.requirements(machine)) == []
    file.write_text("transformers>=6  # newer\ntqdm\n")
    (finding,) = packages.requirements(machine)
    assert (finding.topic, finding.found) == ("ComfyUI needs", "transformers>=6; tested with <5.25,>=5.6.0")


@pytest.mark.parametrize(
    ("name", "version"), [("transformers", "5.25.0"), ("transformers", "4.57.6"), ("jax", "0.11.0")]
)
def test_a_version_that_was_not_run_is_warned_of_once_in_doctors_words(
    name: str, version: str, installed: dict[str, str], caplog: pytest.LogCaptureFixture
):
    installed[name] = version
    versions.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        versions.warn_once()
        versions.warn_once()
    versions.warn_once.cache_clear()
    (record,) = [record for record in caplog.records if record.name == versions.log.name]
    ((found, remedy),) = findings(name)
    assert record.getMessage() == f"{name} {found}. To change it: {remedy}"

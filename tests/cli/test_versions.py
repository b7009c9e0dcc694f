"""The versions that requirements.txt claims, and what is said of others."""

import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.cli.doctor import HostMachine, checks, packages
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime import api, versions
from packaging.version import Version

# What results, file formats and programs depend on.
BOUNDED = ("torch", "jax", "torchax", "diffusers", "transformers", "safetensors", "huggingface-hub", "av", "tpu-info")
# The sets of exact versions that were run together.
LIBTPUS = str(versions._ranges_of_jax()["libtpu"])
SETS = ("constraints.txt", "constraints-newest.txt")
TORCH = f"pip install --index-url {versions.TORCH_INDEX} 'torch<2.16,>=2.13' torchvision torchaudio"


@pytest.fixture
def installed_versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions that count as installed in place of the real ones, by package; an empty one is not installed."""
    others: dict[str, str] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if others.get(name) == "":
            raise importlib.metadata.PackageNotFoundError(name)
        return others.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    forget()
    yield others
    forget()


def forget() -> None:
    versions.warn_once.cache_clear()
    versions.find_refusals.cache_clear()


def findings(topic: str) -> list[tuple[str, str]]:
    return [(each.found, each.remedy) for each in packages.check_versions(HostMachine()) if each.topic == topic]


def pins(file: str) -> dict[str, Version]:
    found = {}
    for pin in versions.read_requirements(versions.ROOT / file):
        (only,) = pin.specifier
        if "*" not in only.version:
            found[pin.name] = Version(only.version)
    return found


@pytest.mark.parametrize("name", BOUNDED)
def test_package_range_ends_at_newest_tested_version(name: str):
    """A later minor version was not run, so it is not claimed."""
    ranges = {package.name: package.range for package in versions.list_packages()}
    run = [pins(file)[name] for file in SETS]
    assert all(ranges[name].contains(version) for version in run)
    newest = max(run)
    later = f"{newest.major + 1}.0.0" if name == "av" else f"{newest.major}.{newest.minor + 1}.0"
    assert not ranges[name].contains(later)
    assert {bound.operator for bound in ranges[name]} in ({">=", "<"}, {"=="})


@pytest.mark.parametrize("file", SETS)
def test_version_set_is_within_package_ranges(file: str):
    ranges = {
        package.name: package.range
        for package in versions.list_packages()
        if package.name not in versions.JAX_COMPANIONS
    }
    outside = {
        name: str(version) for name, version in pins(file).items() if name in ranges and version not in ranges[name]
    }
    assert outside == {}


def test_version_sets_pin_packages_that_affect_results():
    assert all({*BOUNDED, "jaxlib", "libtpu", "numpy"} <= pins(file).keys() for file in SETS)


def test_environment_versions_are_all_tested():
    installed = {package: package.installed for package in versions.list_packages()}
    assert [package.name for package, version in installed.items() if version and package.describe_doubt(version)] == []


@pytest.mark.parametrize(
    ("name", "version", "tested", "command"),
    [
        ("transformers", "4.57.6", "<5.25,>=5.6.0", "pip install 'transformers<5.25,>=5.6.0'"),
        ("jax", "0.13.0", "<0.13,>=0.10.2", "pip install 'jax[tpu]<0.13,>=0.10.2'"),
        ("libtpu", "0.0.12", LIBTPUS, "pip install 'jax[tpu]<0.13,>=0.10.2'"),
        ("torch", "2.12.1+cpu", "<2.16,>=2.13", TORCH),
        ("torch", "2.16.0", "<2.16,>=2.13", TORCH),
    ],
)
def test_doctor_names_untested_version_and_pip_command(
    name: str, version: str, tested: str, command: str, installed_versions: dict[str, str]
):
    assert findings(name)[0][1] == ""
    installed_versions[name] = version
    assert findings(name) == [(f"{version}; tested with {tested}", command)]


def test_check_versions_newer_package_is_not_fault(installed_versions: dict[str, str]):
    """ComfyUI's requirements bring the newest there is: an installation by the book must end well."""
    for name, newer in {"diffusers": "0.43.0", "av": "20.0.1", "tpu-info": "0.15.0"}.items():
        installed_versions[name] = newer
        assert [each.is_fault for each in packages.check_versions(HostMachine()) if each.topic == name] == [False]
    installed_versions["transformers"] = "5.25.1"
    (found,) = [each for each in packages.check_versions(HostMachine()) if each.topic == "transformers"]
    assert not found.is_fault and found.remedy == "pip install 'transformers<5.25,>=5.6.0'"
    assert found.found.startswith("5.25.1; newer than the tested versions, <5.25,>=5.6.0")


def test_doctor_without_packaging_still_reports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    for module in ("cli.doctor.packages", "tpu_runtime.versions"):
        monkeypatch.setitem(sys.modules, f"comfyui_tpu.{module}", None)
    topics = [each.topic for each in checks.report(HostMachine())]
    assert topics[:3] == ["comfyui-tpu", "Python", "packaging"] and "devices" in topics and "torch" not in topics


@pytest.mark.parametrize(
    ("version", "wanted"), [("2.15.0+cu132", "torch==2.15.0"), ("2.16.0+cu132", "'torch<2.16,>=2.13'")]
)
def test_check_torch_build_gpu_build_remedy_pins_supported_version(version: str, wanted: str):
    (finding,) = packages.check_torch_build(HostMachine(packages={"torch": version}))
    assert finding.remedy == f"pip install --force-reinstall --no-deps --index-url {versions.TORCH_INDEX} {wanted}"


def test_check_requirements_reports_untested_comfyui_requirement(tmp_path: Path):
    file = tmp_path / "requirements.txt"
    machine = HostMachine(environ={"COMFYUI_PATH": str(tmp_path)})
    file.write_text("transformers>=4.50.3\nsafetensors>=0.4.2\ntorch\ntqdm\nav>=16.0.0\nnumpy>=1.25.0\nother==1\n")
    assert list(packages.check_requirements(machine)) == []
    file.write_text("transformers>=6  # newer\ntqdm\n")
    (finding,) = packages.check_requirements(machine)
    assert (finding.topic, finding.found) == ("ComfyUI needs", "transformers>=6; tested with <5.25,>=5.6.0")


@pytest.mark.parametrize(
    ("name", "version"), [("transformers", "5.25.0"), ("transformers", "4.57.6"), ("av", "17.0.0")]
)
def test_check_packages_warns_once_about_untested_version(
    name: str, version: str, installed_versions: dict[str, str], caplog: pytest.LogCaptureFixture
):
    installed_versions[name] = version
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            api.check_packages()
    (record,) = [record for record in caplog.records if record.name == versions.log.name]
    ((found, remedy),) = findings(name)
    assert record.getMessage() == f"{name} {found}. To change it: {remedy}"


@pytest.mark.parametrize("name", ["tpu-info", "ftfy"])
def test_check_packages_warns_about_missing_package(
    name: str, installed_versions: dict[str, str], caplog: pytest.LogCaptureFixture
):
    installed_versions[name] = ""
    api.check_packages()
    (record,) = [record for record in caplog.records if record.name == versions.log.name]
    assert record.getMessage() == f"{name} is not installed. To install it: {findings(name)[0][1]}"


# --- with these nothing runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "allowed"),
    [
        ("torch", "2.12.1", "<2.16,>=2.13"),
        ("torch", "2.16.0+cpu", "<2.16,>=2.13"),
        ("torch", "3.0.0.dev20270101", "<2.16,>=2.13"),
        ("torch", "2.13.0rc1", "<2.16,>=2.13"),
        ("jax", "0.9.2", "<0.13,>=0.10.2"),
        ("jax", "0.13.0", "<0.13,>=0.10.2"),
        ("torchax", "0.0.14", "==0.0.13"),
    ],
)
def test_check_packages_unsupported_version_raises_runtime_error(
    name: str, version: str, allowed: str, installed_versions: dict[str, str]
):
    """By the value that came, the allowed ones, and a command for this very environment."""
    installed_versions[name] = version
    ((_, command),) = findings(name)
    run = Expected("packages.run_command", executable=sys.executable, command=command)
    refusal = Expected("packages.version_unsupported", name=name, version=version, range=allowed, help=run)
    with raises_message(RuntimeError, [refusal]):
        api.check_packages()


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.14.1", "2.15.0+cu132", "2.15.9"])
def test_check_packages_accepts_supported_torch_version(version: str, installed_versions: dict[str, str]):
    installed_versions["torch"] = version
    api.check_packages()


@pytest.mark.parametrize("name", ["torch", "jax", "jaxlib", "torchax", "diffusers", "transformers"])
def test_check_packages_missing_package_raises_runtime_error(name: str, installed_versions: dict[str, str]):
    installed_versions[name] = ""
    with raises_message(RuntimeError, [Expected("packages.not_installed", name=name, help="packages.run_command")]):
        api.check_packages()


def test_check_packages_lists_each_refusal_on_one_line(installed_versions: dict[str, str]):
    installed_versions |= {"torch": "2.16.0", "diffusers": ""}
    torch = Expected("packages.version_unsupported", name="torch", version="2.16.0")
    with raises_message(RuntimeError, [torch, Expected("packages.not_installed", name="diffusers")]) as refused:
        api.check_packages()
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["torch", "diffusers"]


def test_check_packages_without_packaging_raises_runtime_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "comfyui_tpu.tpu_runtime.versions")
    monkeypatch.delattr("comfyui_tpu.tpu_runtime.versions")
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    with raises_message(RuntimeError, "packages.not_installed_run_command", name="packaging"):
        api.check_packages()


def test_torch_bridge_refuses_before_importing_torchax(
    installed_versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Whatever asks for it: an engine, a plan, a batch."""
    from comfyui_tpu.tpu_runtime.programs import torch_bridge

    installed_versions["torch"] = "2.16.0"
    torch_bridge._environment.cache_clear()
    monkeypatch.setattr(torch_bridge, "_import_torchax", lambda: pytest.fail("torchax was imported"))
    refusal = Expected("packages.version_unsupported", name="torch", version="2.16.0")
    with raises_message(versions.UnsupportedPackages, [refusal]):
        torch_bridge.to_jax(())

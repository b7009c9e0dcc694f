"""What `comfyui-tpu doctor` advises where the pack came without its repository: by Manager, or as a wheel."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from comfyui_tpu.cli.doctor import comfyui
from comfyui_tpu.cli.doctor.machine import HostMachine
from comfyui_tpu.tests.cli.test_doctor import CASES, unlinked, well, write

__all__ = ["well"]  # a fixture


@pytest.mark.parametrize("fault", [fault for fault, case in CASES.items() if "setup.py" in case[3]])
def test_remedy_without_setup_py_clones_repository(fault: str, well: HostMachine, tmp_path: Path):
    """As Manager or pip installs the pack: no setup.py, which a clone brings."""
    archive = tmp_path / "archive"
    for name in ("pyproject.toml", "requirements.txt", "constraints.txt", "supported.txt"):
        write(archive / name, (well.pack / name).read_text())
    unlinked(well)
    shutil.copytree(archive, well.comfyui / "custom_nodes/comfyui-tpu")
    check, harm, found, _ = CASES[fault]
    harmed = harm(well) or dataclasses.replace(well)
    (finding,) = [each for each in check(dataclasses.replace(harmed, pack=archive)) if each.remedy]
    assert found in finding.found and str(archive) not in finding.remedy
    cloned = f"git clone {comfyui.REPOSITORY} && python3 ComfyUI-TPU/setup.py "
    assert finding.remedy.startswith(cloned) and finding.remedy.count("setup.py") == 1


@pytest.mark.parametrize(("fault", "command"), [("unconstrained", "kill 77; cd "), ("port in use", "cd ")])
def test_remedy_without_setup_py_starts_comfyui_directly(fault: str, command: str, well: HostMachine, tmp_path: Path):
    unlinked(well)
    check, harm, *_ = CASES[fault]
    harm(well)
    (finding,) = [each for each in check(dataclasses.replace(well, pack=tmp_path)) if each.remedy]
    assert finding.remedy.startswith(f"{command}{well.comfyui} && ") and "setup.py" not in finding.remedy
    assert "python main.py --cpu" in finding.remedy


def test_setup_command_uses_clone_in_custom_nodes(well: HostMachine, tmp_path: Path):
    """Where the command itself comes from a wheel."""
    command = comfyui.setup_command(dataclasses.replace(well, pack=tmp_path), "update")
    assert command == f"python3 {well.pack / 'setup.py'} update --comfyui {well.comfyui}"

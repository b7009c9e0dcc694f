"""`comfyui-tpu doctor`: a machine that is well, and each fault put into it."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_tpu.cli.doctor import HostMachine, checks, chips, comfyui, disk, host, packages
from comfyui_tpu.cli.doctor.checks import CHECKS
from comfyui_tpu.tests.cli.doctor_faults import (
    Harm,
    aborting,
    another,
    bare,
    broken,
    copied_too,
    crystools,
    dangling,
    demanding,
    env,
    environment,
    few_mappings,
    forbidden,
    full,
    halted,
    held,
    held_by_another,
    in_memory,
    installed,
    linked_twice,
    listening,
    little_memory,
    locked,
    new_style,
    no_comfyui,
    no_token,
    offline,
    old_pack,
    old_python,
    pip_conf,
    server,
    slow_disk,
    slow_pages,
    taken,
    too_small,
    unconstrained,
    unlinked,
    unmanaged,
    unmapped,
    unwritable,
    version,
    write,
)
from comfyui_tpu.tests.support.patience import PATIENCE_S

fake_tpu = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu", reason="no tpu-info: it is for Linux")

GIB = 2**30
CPU = {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "sentencepiece": "0.2.3", "protobuf": "7.36.2"}
NOBODY = {"TPU_RUNTIME_METRICS_PORTS": str(fake_tpu.closed())}


@pytest.fixture
def well(tmp_path: Path) -> HostMachine:
    """A TPU VM where everything is as it should be: 8 chips, ComfyUI with this pack and others, a model."""
    root, home = fake_tpu.plug(tmp_path / "root", "v6e", 8), tmp_path / "home"
    write(root / chips.HUGEPAGES, "[always] madvise never\n")
    write(root / "proc/meminfo", "MemTotal: 1000000000 kB\nMemAvailable:   900000000 kB\n")
    write(root / "proc/net/tcp", "  sl  local_address rem_address   st\n")
    write(home / ".cache/huggingface/token", "hf_secret")
    (home / ".cache/huggingface/hub/models--Wan-AI--Wan2.1-T2V-14B-Diffusers").mkdir(parents=True)
    folder = home / "ComfyUI"
    write(folder / "main.py", "")
    write(folder / "requirements.txt", "torch\nav>=16.0.0\n")
    write(folder / "comfyui_version.py", '__version__ = "0.33.0"\n')
    write(folder / "custom_nodes/ComfyUI-Manager/__init__.py", "NODE_CLASS_MAPPINGS = {}")
    write(
        folder / "custom_nodes/Other/nodes.py",
        'NODE_CLASS_MAPPINGS = {"MyWan21TextEncoder": 1}  # "TPUPlan" is not ours',
    )
    write(folder / "custom_nodes/ComfyUI-Old.disabled/nodes.py", 'NODE_CLASS_MAPPINGS = {"Flux2TextEncoder": 1}')
    (folder / "custom_nodes/ComfyUI-TPU").symlink_to(HostMachine().pack)
    return HostMachine(
        root=root, home=home, environ={"PATH": os.environ["PATH"], **NOBODY}, packages=CPU,
        free_bytes=lambda path: 500 * GIB, memlock_bytes=lambda: None, python="3.11.9",
    )  # fmt: skip


CASES: dict[str, tuple[Callable, Harm, str, str]] = {
    "GPU build": (packages.check_torch_build, installed(torch="2.15.0+cu132"), "2.15.0+cu132, a GPU build",
    "cpu torch==2.15.0"),
    "GPU build by its packages": (
        packages.check_torch_build, installed(torch="2.13.0", nvidia_cublas="13.1", nvidia_ml_py="1"),
        "2.13.0, a GPU build with 1 nvidia packages", "pip uninstall -y nvidia-cublas; pip install --force-reinstall",
    ),
    "two libtpus": (
        host.check_conflicting_packages, installed(libtpu_nightly="0.1", libtpu="0.0.42.1"),
        "0.1, in the folder of libtpu", "-y libtpu-nightly && pip install --force-reinstall --no-deps libtpu==0.0.42.1",
    ),
    "SIGABRT": (
        host.check_tokenizer, aborting, "fails with protobuf 7.36.2: signal 6",
        "constraints.txt sentencepiece protobuf",
    ),
    "container without chips": (
        chips.check_chips, bare, "8 x v6e on the bus, but no device files", "again with --version=v2-alpha-tpuv6e",
    ),
    "chips of an unknown kind": (chips.check_chips, unmapped, "8 device files (0, ...)", "pip install 'tpu-info"),
    "no rights": (chips.check_device_permissions, forbidden, "no permission to use /dev/vfio/3",
    "sudo chmod a+rw /dev/vfio/3"),
    "another user's lock": (chips.check_device_permissions, locked, "libtpu cannot lock it",
    "sudo rm /tmp/libtpu_lockfile"),
    "TPU held": (chips.check_holders, held, "by python3 train.py, process 42", "kill 42"),
    "TPU held by another user": (
        chips.check_holders, held_by_another, "by python3 train.py, process 42, of another user",
        "Wait until it has ended",
    ),
    "little may be locked": (
        chips.check_locked_memory, lambda machine: dataclasses.replace(machine, memlock_bytes=lambda: 8 * 2**20),
        "8.0 MiB may be locked", "ulimit -l unlimited",
    ),
    "few mappings": (chips.check_locked_memory, few_mappings, "65535 mappings for each chip",
    "dma_entry_limit=1000000"),
    "a release candidate": (
        host.check_python, lambda machine: dataclasses.replace(machine, python="3.11.0rc1"),
        "3.11.0rc1 on Linux, which was never released", "--only-upgrade python3.11",
    ),
    "hugepages": (chips.check_hugepages, slow_pages, "off: the TPU starts",
    "sudo sh -c 'echo always > /sys/kernel/mm/"),
    "JAX on the CPU": (chips.check_variables, env(JAX_PLATFORMS="cpu"), "cpu: the TPU is not used",
    "unset JAX_PLATFORMS"),
    "another libtpu": (
        chips.check_variables, env(TPU_LIBRARY_PATH="/lib/libtpu.so"), "/lib/libtpu.so, instead of",
        "unset TPU_LIBRARY_PATH",
    ),
    "no slice": (
        chips.check_variables, env(TPU_SKIP_MDS_QUERY="1"), "without TPU_ACCELERATOR_TYPE", "unset TPU_SKIP_MDS_QUERY",
    ),
    "flags that abort": (
        chips.check_flags, env(XLA_FLAGS="--xla_a=1 --xla_tpu_b=2", LIBTPU_INIT_ARGS="--c=3"),
        "--xla_tpu_b=2: only libtpu knows these", "export XLA_FLAGS=--xla_a=1 LIBTPU_INIT_ARGS='--c=3 --xla_tpu_b=2'",
    ),
    "64 bits": (chips.check_variables, env(JAX_ENABLE_X64="true"), "true: never tested", "unset JAX_ENABLE_X64"),
    "no broadcasting": (
        chips.check_variables, env(JAX_NUMPY_RANK_PROMOTION="raise"), "raise: JAX refuses",
        "unset JAX_NUMPY_RANK_PROMOTION",
    ),
    "no mixed types": (
        chips.check_variables, env(JAX_NUMPY_DTYPE_PROMOTION="strict"), "strict: JAX refuses",
        "unset JAX_NUMPY_DTYPE_PROMOTION",
    ),
    "another precision": (
        chips.check_variables, env(JAX_DEFAULT_MATMUL_PRECISION="highest"),
        "highest: changes products of bfloat16 programs", "unset JAX_DEFAULT_MATMUL_PRECISION",
    ),
    "budget too high": (
        chips.check_memory_limit, env(COMFYUI_TPU_HBM_GIB="40"), "40 GiB, more than the 32.0 GiB of a v6e",
        "unset COMFYUI_TPU_HBM_GIB",
    ),
    "no budget": (chips.check_memory_limit, env(COMFYUI_TPU_HBM_GIB="all"), "'all' is not a number",
    "unset COMFYUI_TPU_HBM_GIB"),
    "kernel switched off": (
        chips.check_fallbacks, env(COMFYUI_TPU_KERNELS="-attention"), "attention: results are unchanged",
        "unset COMFYUI_TPU_KERNELS",
    ),
    "no switch": (chips.check_fallbacks, env(COMFYUI_TPU_OPTIONS="-all"), "'-all' must be one of",
    "unset COMFYUI_TPU_OPTIONS"),
    "a halt": (chips.check_fallbacks, halted, "8 x TPU v6 lite: decode halted the chips", "rm "),
    "cache not writable": (host.check_caches, unwritable, "/cache cannot be written", "unset COMFYUI_TPU_CACHE"),
    "programs not writable": (
        host.check_caches, env(JAX_COMPILATION_CACHE_DIR="/dev/null/xla"), "/dev/null/xla cannot be written",
        "unset JAX_COMPILATION_CACHE_DIR",
    ),
    "models in memory": (host.check_caches, in_memory, "/dev/shm/hub is memory of the host", "unset HF_HOME"),
    "disk full": (disk.check_free_space, full, "1.0 GiB free in", "export HF_HOME=FOLDER"),
    "disk too small": (disk.check_free_space, too_small, "the smallest model needs 16.0 GiB", "export HF_HOME=FOLDER"),
    "a slow disk": (disk.check_read_rate, slow_disk, "0.10 GB/s, read from", "on a faster disk"),
    "offline": (host.check_downloaded_models, offline, "no model of this pack is downloaded", "unset HF_HUB_OFFLINE"),
    "no token": (host.check_token, no_token, "none; only gated models need one (FLUX.2-dev", "hf auth login"),
    "little memory": (host.check_memory, little_memory, "3.0 GiB free; compiling", "ps aux --sort=-rss"),
    "pip.conf": (host.check_pip, pip_conf, "pip.conf lets pip write", "pip config --user unset global.break-system"),
    "no ComfyUI": (comfyui.check_version, no_comfyui, "/ComfyUI; the command line does not need it",
    "setup.py install --comfyui"),
    "old ComfyUI": (comfyui.check_version, version("0.3.9"), "0.3.9; the pack needs 0.3.76",
    "checkout master && git -C"),
    "old ComfyUI of ours": (comfyui.check_version, version("0.3.9", ours=True), "0.3.9; the pack", "setup.py update"),
    "very old ComfyUI": (comfyui.check_version, version(""), "too old to have a version", "pull"),
    "demanding ComfyUI": (packages.check_requirements, demanding, "transformers>=6; tested with",
    "Take a ComfyUI that"),
    "not linked": (comfyui.check_this_pack, unlinked, "not in", "ln -s "),
    "linked twice": (comfyui.check_this_pack, linked_twice, "as comfyui-tpu: ComfyUI loads both", "rm "),
    "linked and copied": (comfyui.check_this_pack, copied_too, "as Copy: ComfyUI loads both", "Copy.disabled"),
    "another copy": (comfyui.check_this_pack, another, "Copy, this command's is", "pip install --no-deps -e"),
    "a link to nowhere": (comfyui.check_this_pack, dangling, "Gone links to /nowhere/at/all", "/custom_nodes/Gone"),
    "separate packs": (
        comfyui.check_other_packs, old_pack,
        "ComfyUI-FLUX.2-TPU has nodes of the same names (Flux2TPUSampler, Flux2TextEncoder)", "FLUX.2-TPU.disabled",
    ),
    "the same node of another": (comfyui.check_other_packs, new_style, "wan.py has nodes of the same",
    "wan.py.disabled"),
    "a monitor that starts the TPU": (
        comfyui.check_other_packs, crystools, "ComfyUI-Crystools starts the TPU when ComfyUI starts",
        "Crystools.disabled",
    ),
    "no Manager": (comfyui.check_manager, unmanaged, "not installed", "/ComfyUI/manager_requirements.txt, then start"),
    "broken environment": (packages.check_environment, broken("venv"), "broken: ", "python3 -m venv --upgrade"),
    "our broken environment": (packages.check_environment, broken(".comfyui-tpu/venv"), "broken: ", "setup.py install"),
    "Python 3.10": (packages.check_environment, old_python, "Python 3.10; the pack needs 3.11", "setup.py install"),
    "unconstrained": (comfyui.check_running, unconstrained, "process 77 runs without PIP_CONSTRAINT",
    "kill 77; python3 "),
    "port in use": (comfyui.check_running, taken, "in use by jupyter lab, process 88", "--port 8189"),
    "port in use by another user": (comfyui.check_running, listening, "in use by a program of another user",
    "--port 8189"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CASES)
def test_doctor_check_reports_fault_with_remedy(fault: str, well: HostMachine):
    check, harm, found, remedy = CASES[fault]
    assert [finding for finding in check(well) if finding.remedy] == []
    (finding,) = [finding for finding in check(harm(well) or dataclasses.replace(well)) if finding.remedy]
    assert found in finding.found and remedy in finding.remedy, finding
    assert "\n" not in finding.found + finding.remedy and "secret" not in str(finding)


def test_doctor_cases_cover_every_check():
    # tests/cli/test_versions.py, below, and what is no fault
    elsewhere = {packages.check_versions, packages.check_companions, host.check_pack}
    assert {check for check, *_ in CASES.values()} | elsewhere == {*packages.CHECKS, *CHECKS}


def test_check_companions_names_mismatched_torchvision(well: HostMachine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "_requires", lambda name: ["numpy", "torch==2.13.0"])
    assert list(packages.check_companions(well)) == []
    (finding,) = packages.check_companions(installed(torch="2.12.1+cpu")(well))
    assert finding.found == "0.28.0+cpu, built for torch==2.13.0; torch is 2.12.1+cpu"
    assert finding.remedy.endswith("torch==2.12.1 torchvision")


def test_doctor_on_healthy_machine_reports_ready(well: HostMachine, capsys: pytest.CaptureFixture[str]):
    assert checks.run(SimpleNamespace(json=False, start=False, model=""), well) == 0
    text = capsys.readouterr().out
    assert "devices                8 x v6e, 32.0 GiB each\nmesh with guidance     dp=2 sp=4 tp=1\n" in text
    assert "->" not in text.replace("ComfyUI-TPU ->", "") and "if wanted" not in text
    assert text.endswith("\n\nThis machine is ready: nothing has to be fixed.\n")
    held(well)
    assert checks.verdict(checks.report(well)) == "1 thing has to be fixed, by the command after each ->: TPU in use."


@pytest.mark.parametrize(("harm", "code"), [(no_token, 0), (held, 1)])
def test_doctor_json_lists_findings_and_advice_exits_zero(
    harm: Harm, code: int, well: HostMachine, capsys: pytest.CaptureFixture[str]
):
    harm(well)
    assert checks.run(SimpleNamespace(json=True, start=False, model=""), well) == code
    findings = json.loads(capsys.readouterr().out)
    assert all(set(finding) == {"topic", "found", "remedy", "advice"} for finding in findings)
    assert [finding["advice"] for finding in findings if finding["remedy"]] == [code == 0]


@contextlib.contextmanager
def metrics(kind: str) -> Iterator[Harm]:
    usage = chips.metrics_service.read_usage
    with fake_tpu.serving(8) if kind == "serving" else fake_tpu.silent() as port, pytest.MonkeyPatch.context() as patch:
        if kind == "serving":  # which a busy machine may take longer for than a second
            patch.setattr(chips.metrics_service, "read_usage", lambda ports: usage(ports, PATIENCE_S))
        yield env(TPU_RUNTIME_METRICS_PORTS=str(port))


def test_check_holders_reports_process_of_another_user(well: HostMachine):
    with metrics("serving") as harm:
        (finding,) = chips.check_holders(harm(well))
    assert finding.found == "by a process of another user, 36.0 GiB of 248.0 GiB used"
    assert finding.remedy.startswith("sudo lsof /dev/accel* /dev/vfio/*")


def test_check_fallbacks_reports_first_run_measurements(well: HostMachine):
    found = {"reserve_share": 0.08, "compilers_behind": 1, "keeps_programs": False, "rates": {"to_chips": 12.34}}
    write(well.home / ".cache/comfyui-tpu/machine.json", json.dumps({"8 x TPU v6 lite": found}))
    (finding,) = chips.check_fallbacks(well)
    assert finding.remedy == "" and finding.found == (
        "8 x TPU v6 lite: 8 % of a chip's memory is left free, 1 compile in the background, "
        "compiled programs are not loaded from the disk, 12.3 GB/s to the chips"
    )


def test_check_holders_accepts_comfyui_on_chips(well: HostMachine):
    server(well, 77, "/dev/vfio/0", environ={"PIP_CONSTRAINT": "/constraints.txt"})
    with metrics("serving") as harm:
        (finding,) = chips.check_holders(harm(well))
    assert finding.found.startswith("by ComfyUI (python main.py, process 77, 36.0 GiB of 248.0 GiB used)")
    assert not finding.remedy and list(comfyui.check_running(well)) == []


def test_check_holders_reports_silent_metrics_service(well: HostMachine):
    with metrics("silent") as harm:
        (finding,) = chips.check_holders(harm(well))
    assert "does not answer: the process that holds the chips hangs" in finding.found


def test_check_running_accepts_comfyui_on_port_8188(well: HostMachine):
    server(well, 77, "socket:[5555]", environ={"PIP_CONSTRAINT": "/constraints.txt"})
    listening(well)
    (finding,) = comfyui.check_running(well)
    assert (finding.topic, finding.found, finding.remedy) == ("port 8188", "ComfyUI, process 77", "")


def test_check_environment_reports_unsupported_versions_in_venv(well: HostMachine):
    versions = {name: package.version for name, package in _tested_packages().items()}
    environment(well, **versions)
    assert list(packages.check_environment(well)) == []
    environment(well, ".comfyui-tpu/venv", **{**versions, "diffusers": "0.30.0", "jax": "0.5.0"})
    found = {finding.found.partition(";")[0]: finding.remedy for finding in packages.check_environment(well)}
    assert set(found) == {"jax 0.5.0", "diffusers 0.30.0"}
    assert found["diffusers 0.30.0"].endswith(".comfyui-tpu/venv/bin/python -m pip install 'diffusers<0.43,>=0.42.1'")


def _tested_packages() -> Mapping[str, SimpleNamespace]:
    from comfyui_tpu.tpu_runtime import versions

    return {package.name: SimpleNamespace(version=package.installed) for package in versions.list_packages()}


def test_check_chips_without_tpu_reports_simulated_cpu_chips(well: HostMachine):
    shutil.rmtree(well.root)
    found = [one.found for one in chips.check_chips(env(XLA_FLAGS="--xla_force_host_platform_device_count=3")(well))]
    assert found[0] == "no TPU; programs run on the CPU, as 3 simulated chips"
    assert found[1] == "dp=1 sp=3 tp=1"


def test_check_jax_start_reports_devices_or_abort(well: HostMachine):
    environ = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    (finding,) = chips.check_jax_start(dataclasses.replace(well, environ=environ))
    assert (finding.found, "unset JAX_PLATFORMS" in finding.remedy) == ("starts: 1 x cpu (cpu)", True)
    (finding,) = chips.check_jax_start(dataclasses.replace(well, environ={**environ, "XLA_FLAGS": "--xla_tpu_b=2"}))
    assert "Unknown flag in XLA_FLAGS: --xla_tpu_b=2" in finding.found and finding.remedy

"""One model over two hosts: the frames of one process, one cancel for both, and a sentence when one is gone."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from comfyui_tpu.distributed.multihost import handshake, rank
from comfyui_tpu.distributed.multihost.coordinator import RESTART_EXIT_CODE
from comfyui_tpu.tests.support import hosts
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import spec_for_family

SPEC = spec_for_family("Wan21")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id)
SETTINGS = SPEC.settings(**{**SPEC.miniature.inputs, "num_frames": 5, "num_inference_steps": 2})


def lost_host_message(lead: hosts.Lead) -> str:
    """What is said next, if it is said of another host: there is no need to wait until all have started again."""
    said = lead.next("ended", "text", "ready", within_s=hosts.ENDS_S)
    assert "ready" not in said, "nothing was said of the host that is gone"
    sentence = said.get("sentence") or said.get("text", "")
    return sentence if "ended" in said or sentence.startswith("Host ") else ""


@pytest.mark.slow
def test_two_hosts_match_one_process_and_report_cancel_and_lost_host(tmp_path: Path):
    """To the bit. With a cache of their own: what another process compiled for as many chips may sum in another order.

    That all begin again, and much else, is in `test_matrix`.
    """
    cache = tmp_path / "cache"
    with hosts.running(tmp_path, cache, count=2, chips=1) as two:
        two.lead.send(model=SPEC.name)
        with hosts.alone(tmp_path, cache, chips=2) as one:
            expected = one.ask(model=SPEC.name)
        first = two.lead.next("ended")
        assert first["ended"] == expected["ended"] == "done", (first, expected)
        assert (first["latents"], first["frames"]) == (expected["latents"], expected["frames"])

        assert two.lead.ask(model=SPEC.name, cancel=["denoise", "step"])["ended"] == "Cancelled"
        two.lead.send(model=SPEC.name, steps=100)
        while two.lead.next("step")["step"] != ["denoise", "step"]:
            pass
        two.at_work(1).kill()
        while not (sentence := lost_host_message(two.lead)):
            pass
        assert sentence.startswith("Host 1 (127.0.0.1) was lost (") and "All hosts start again" in sentence


@pytest.mark.parametrize(
    ("environment", "metadata", "found"),
    [
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a.svc,b.svc"}, {}, "1/2@a.svc:8476"),
        ({"TPU_WORKER_ID": "0", "TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471"}, {}, "0/2@10.0.0.1:8476"),
        (
            {},
            {"worker-network-endpoints": "w:7:10.1.0.2,w:8:10.1.0.3", "agent-worker-number": "1"},
            "1/2@10.1.0.2:8476",
        ),
    ],
    ids=["gke", "gke with ports", "compute engine"],
)
def test_detect_rank_reads_environment_or_metadata(environment, metadata, found):
    assert str(rank.detect_rank.__wrapped__(environment, metadata.__getitem__)) == found


@pytest.mark.parametrize(("host", "own"), [("10.0.0.2", "10.0.0.2"), ("[::1]", "::1")])
def test_parse_rank_round_trips_and_jax_uses_next_port(host: str, own: str):
    """An IPv6 address without brackets is none that JAX's coordinator can be reached at."""
    found = rank.parse_rank(f"1/2@{host}:8476")
    assert found.address.host == own and str(found) == f"1/2@{host}:8476" and found.jax_address == f"{host}:8477"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("2/2@host:1", "multihost.process_outside"),
        ("host:1", "multihost.rank_malformed"),
        ("0/2@host", "multihost.rank_malformed"),
        ("0/2@host:70000", "multihost.port_outside"),
    ],
)
def test_parse_rank_invalid_text_raises_value_error(text: str, key: str):
    with raises_message(ValueError, key, variable="COMFYUI_TPU_HOSTS", text=repr(text)):
        rank.parse_rank(text)


def test_describe_difference_names_differing_version():
    mine = handshake.host_versions()
    assert mine["jax"] == jax.__version__ and len(mine["the pack's source"]) == 12
    assert handshake.describe_difference(mine, mine) is None
    assert handshake.describe_difference(
        {"jax": "1", "numpy": np.__version__}, {"jax": "2", "numpy": np.__version__}
    ) == ("jax: 2 there, 1 here")


# Small processes of their own, as in use: what keeps another running forks, which a process of many gigabytes may not.
KEEPER = """
import os, signal, subprocess, sys
from comfyui_tpu.distributed.multihost import supervisor
supervisor.PAUSE_S = 0.01
"""


def test_supervise_restarts_after_restart_code_or_kill_only(tmp_path: Path):
    starts = tmp_path / "starts"
    script = f"""
import os, signal
from pathlib import Path
starts = Path({str(starts)!r})
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
assert os.environ["COMFYUI_TPU_SUPERVISED"] == "1" and os.environ["COMFYUI_TPU_HOSTS"] == "here"
if number == 0:
    os._exit({RESTART_EXIT_CODE})
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(3)
"""
    keeper = KEEPER + "sys.exit(supervisor.supervise(sys.argv[1:], {'COMFYUI_TPU_HOSTS': 'here'}))"
    assert subprocess.run([sys.executable, "-c", keeper, sys.executable, "-S", "-c", script]).returncode == 3
    assert starts.read_text() == "xxx"


def test_supervise_forwards_signal_during_process_start():
    keeper = (
        KEEPER
        + """
class Popen(subprocess.Popen):
    def __init__(self, *words, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*words, **options)

subprocess.Popen = Popen
sys.exit(supervisor.supervise(sys.argv[1:], {}))
"""
    )
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    done = subprocess.run([sys.executable, "-c", keeper, *sleeper])
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is not told that its parent is gone")
def test_supervised_process_ends_when_supervisor_is_killed(tmp_path: Path):
    said = tmp_path / "pid"
    child = f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid()) + ' '); time.sleep({PATIENCE_S})"
    keeper = (
        "import sys; from comfyui_tpu.distributed.multihost import supervisor; supervisor.supervise(sys.argv[1:], {})"
    )
    process = subprocess.Popen([sys.executable, "-c", keeper, sys.executable, "-S", "-c", child])
    until(lambda: said.exists() and said.read_text().endswith(" "))
    kept = psutil.Process(int(said.read_text()))
    assert kept.ppid() == process.pid
    process.kill()
    process.wait()
    psutil.wait_procs([kept], timeout=PATIENCE_S)
    assert not kept.is_running()

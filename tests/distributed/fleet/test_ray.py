"""A batch over a Ray cluster of four simulated machines with four chips each, of which some are lost. By hand:
`pytest -m recorded tests/distributed/fleet/test_ray.py -s`. It takes minutes, and needs the extra `fleet`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.tests.support.fleet import WORKFLOW, packets, prompts
from comfyui_tpu.tests.support.patience import PATIENCE_S, until

JOBS, NODES = 64, 4
CODE = "import sys; from comfyui_tpu.cli.main import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))\n"


@pytest.mark.recorded
def test_ray_batch_survives_two_killed_machines_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    lines, out, program = prompts(tmp_path / "prompts.jsonl", JOBS), tmp_path / "out", tmp_path / "driver.py"
    program.write_text(CODE)
    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    nodes = [cluster.add_node(resources={"TPU": 4}, **small) for _ in range(NODES)]
    cluster.wait_for_nodes()
    command = [sys.executable, str(program), "batch", str(WORKFLOW), "--tiny", "--set-from", str(lines)]
    command += ["--out", str(out), "--ray", cluster.address]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def done() -> int:
        return len(list((out / "done").glob("*.json"))) if out.exists() else 0

    try:
        began = time.monotonic()
        driver = start()
        until(lambda: done() >= JOBS // 4 or driver.poll() is not None)
        for node in nodes[:2]:
            cluster.remove_node(node, allow_graceful=False)
        print(f"\n{done()} done after {time.monotonic() - began:.0f} s: two machines killed")
        until(lambda: done() >= JOBS // 2 or driver.poll() is not None)
        driver.kill()
        print(f"{done()} done after {time.monotonic() - began:.0f} s: the driver killed\n{driver.communicate()[0]}")
        cluster.add_node(resources={"TPU": 4}, **small)
        last = start()
        said, _ = last.communicate(timeout=PATIENCE_S)
        print(said)
        assert last.returncode == 0 and f"{JOBS} of {JOBS} jobs are done" in said
    finally:
        cluster.shutdown()
    records = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    assert sorted(record["line"] for record in records) == list(range(1, JOBS + 1))
    assert len({record["job"] for record in records}) == JOBS and len(list((out / "results").iterdir())) == JOBS
    for number, line in enumerate(lines.read_text().splitlines(), start=1):
        alone, sets = tmp_path / "alone", [f"{name}={value}" for name, value in json.loads(line).items()]
        options = [part for each in sets for part in ("--set", each)]
        assert cli.main(["run", str(WORKFLOW), "--tiny", *options, "--out", str(alone / str(number))]) == 0
        (file,) = next(record["files"] for record in records if record["line"] == number)
        assert packets(out / file) == packets(alone / str(number) / "wan21.mp4") != [], line
    print(f"workers: {sorted({record['worker'] for record in records})}, all {JOBS} equal to the serial run")

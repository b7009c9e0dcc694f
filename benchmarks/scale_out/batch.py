"""Measure the cost of driving a batch: time and memory of the driver for many jobs of a stub that takes no time.

Run: python benchmarks/scale_out/batch.py [--jobs 10000] [--workers 64] [--sizes 1] [--ray]
The stub writes a result and a record for each job, as a worker does, in the driver's own process; its time is included.
With --ray it is an actor on each of four simulated machines, and Ray's overhead is included too.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from comfyui_tpu.distributed.fleet.cluster import RayWorkers
from comfyui_tpu.distributed.fleet.driver import Driver, View
from comfyui_tpu.distributed.fleet.jobs import JobTemplate, read_jobs
from comfyui_tpu.distributed.fleet.messages import JobRequest, Workers
from comfyui_tpu.distributed.fleet.store import BatchStore
from comfyui_tpu.distributed.fleet.worker import WorkerActor
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.overrides import read_json
from comfyui_tpu.tests.support.fleet import WORKFLOW, Inline, keep
from comfyui_tpu.tpu_runtime.progress import SilentProgress

_HEIGHTS = range(64, 721, 16)


class StubActor(WorkerActor):
    """With jobs that take no time."""

    def run(self, request: JobRequest) -> dict[str, Any]:
        return keep(self.name, request)


def lines(count: int, sizes: int) -> list[str]:
    """Jobs of `sizes` sizes, mixed, with prompts of a usual length."""
    prompt = "A cat and a dog baking a cake together in a kitchen, filmed from above in warm light. " * 3
    return [
        json.dumps({"1.prompt": f"{prompt}{index}", "2.seed": index, "2.height": _HEIGHTS[index % sizes]})
        for index in range(count)
    ]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(count: int, sizes: int, workers: Workers, out: Path) -> None:
    """Prints seconds and memory of a batch, and of a second call that finds all of it done."""
    recipe = JobTemplate(_workflow(), Folders(output=out / "none"), SilentProgress())
    before_mib, begun = peak_mib(), time.perf_counter()
    jobs = read_jobs(recipe, lines(count, sizes), "lines")
    read = time.perf_counter()
    store = BatchStore(str(out))
    with store.open_as_driver():
        ended = Driver(recipe, jobs, store, workers, 3, View()).run()
    ran = time.perf_counter()
    assert ended.done == count
    print(f"{count} jobs, {sizes} sizes")
    print(f"  reading and checking  {read - begun:7.2f} s  {(read - begun) / count * 1e3:6.3f} ms a job")
    print(f"  driving               {ran - read:7.2f} s  {(ran - read) / count * 1e3:6.3f} ms a job")
    again = BatchStore(str(out))
    with again.open_as_driver():
        Driver(recipe, jobs, again, Inline([]), 3, View()).run()
    print(f"  a second call         {time.perf_counter() - ran:7.2f} s")
    print(
        f"  memory of the driver  {peak_mib():7.0f} MiB at most, of it {peak_mib() - before_mib:.0f} MiB for the jobs"
    )


def _workflow() -> dict:
    workflow = read_json(WORKFLOW)
    make_tiny(workflow)
    return workflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sizes", type=int, default=1, choices=range(1, len(_HEIGHTS) + 1), metavar="N")
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="comfyui-tpu-fleet-") as folder:
        if not options.ray:
            workers = Inline([f"worker {index}" for index in range(options.workers)])
            measure(options.jobs, options.sizes, workers, Path(folder))
            return
        from ray.cluster_utils import Cluster

        small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=small)
        for _ in range(4):
            cluster.add_node(resources={"TPU": 4}, **small)
        workers = RayWorkers(str(cluster.address), StubActor)
        try:
            measure(options.jobs, options.sizes, workers, Path(folder))
        finally:
            workers.close()
            cluster.shutdown()


if __name__ == "__main__":
    main()

"""The chips of all hosts as one: `jax.distributed`, which every process starts at the same time."""

import os

from ...tpu_runtime.messages import compose
from .rank import HostRank

# Set in processes that are started again when they end.
SUPERVISED = "COMFYUI_TPU_SUPERVISED"
# How long the processes wait for each other, in seconds.
JOIN_S = 50
# Longer than our own detection of lost hosts, in seconds: JAX would end the process without an explanation.
HEARTBEAT_S = 300
# How long JAX waits for other processes at exit, in seconds; they have ended by then.
SHUTDOWN_S = 5


def initialize(place: HostRank) -> None:
    """Initialize `jax.distributed`, before JAX touches a device. Returns when all processes have called it."""
    import jax

    # It would handle SIGTERM itself, and is not used.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.jax_address,
        place.count,
        place.process,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )


def recovery_advice() -> str:
    """Return the sentence that follows the report of a lost host."""
    if os.environ.get(SUPERVISED):
        return compose("multihost.queue_again")
    return compose("multihost.restart_process")

"""The chips of all hosts as one: `jax.distributed`, started by every process at the same time."""

import os

from .place import Place

# Set where somebody starts the process again when it ends.
SUPERVISED = "COMFYUI_TPU_SUPERVISED"
# A process that does not come while the others wait.
JOIN_S = 50
# We know within seconds that a host is gone, and end in order; JAX would end the process, with less to say.
HEARTBEAT_S = 300
# How long JAX waits at its end for others, which have ended by then.
SHUTDOWN_S = 5


def start(place: Place) -> None:
    """Before JAX touches a device; returns when all have called it."""
    import jax

    # It would take SIGTERM for itself, and nobody asks it.
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


def what_now() -> str:
    """What follows from a host that is gone."""
    if os.environ.get(SUPERVISED):
        return "All hosts start again; queue the prompt again in a minute."
    return "This process ends, and must be started again, as `setup.py start --hosts` does by itself."

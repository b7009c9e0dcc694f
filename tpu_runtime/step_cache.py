"""Which denoising steps may reuse the inner features of an earlier one. Pure arithmetic: no torch, no devices.

How a denoiser keeps and reuses them is its model's to say (`spec.StepReuse`); the programs are in `cached_steps`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .spec import StepCache


def full_steps(policy: StepCache | None, experts: Sequence[str]) -> tuple[bool, ...]:
    """For each step, by the expert that runs it, whether it is a full one; all are without a `policy`.

    The features of one expert mean nothing to another: its first step is full.
    """
    return tuple(
        policy is None or policy.is_full(index) or index == 0 or expert != experts[index - 1]
        for index, expert in enumerate(experts)
    )


def policy_of(widgets: Mapping[str, Any]) -> StepCache | None:
    """The policy that `step_cache` (on or off), `cache_start`, `cache_end` and `cache_interval` ask for."""
    if not widgets.get("step_cache", False):
        return None
    return StepCache(start=widgets["cache_start"], end=widgets["cache_end"], interval=widgets["cache_interval"])

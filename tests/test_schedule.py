"""Solver tables against the upstream schedulers that they were read from, on random trajectories."""

import numpy as np
import pytest
import torch
from comfyui_tpu.tpu_runtime import schedule

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
CONFIGS = {
    "unipc": {"_class_name": "UniPCMultistepScheduler", **FLOW},
    "unipc order 3": {"_class_name": "UniPCMultistepScheduler", **FLOW, "solver_order": 3},
    "unipc, no corrector at first": {
        "_class_name": "UniPCMultistepScheduler", **FLOW, "disable_corrector": [0, 1]
    },
    "euler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
    "dpm++": {"_class_name": "DPMSolverMultistepScheduler", **FLOW},
    "ddim of CogVideoX": {
        "_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
        "snr_shift_scale": 1.0, "timestep_spacing": "trailing",
    },
    "ddim": {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "clip_sample": False},
}  # fmt: skip


def trajectory(config: dict, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The upstream scheduler's last sample and the table's, for outputs that depend on the sample."""
    table = schedule.probe(schedule.scheduler_from(config), num_steps)
    upstream = schedule.scheduler_from(config)
    upstream.set_timesteps(num_steps)
    generator = torch.Generator().manual_seed(num_steps)
    sample, *outputs = (torch.randn(1, 16, 3, 5, 7, generator=generator) for _ in range(1 + num_steps))
    state = schedule.initial_state(sample.numpy(), table.num_memory)
    for index, timestep in enumerate(upstream.timesteps):
        *state, _ = schedule.advance(state, np.asarray(outputs[index].numpy() + 0.3 * state[0]), table.table[index])
        output = outputs[index] + 0.3 * sample
        sample = upstream.step(output, timestep, sample, return_dict=False)[0]
    assert (table.timesteps == upstream.timesteps.numpy()).all()
    return np.asarray(state[0]), sample.numpy()


@pytest.mark.parametrize("num_steps", [1, 2, 6, 50])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_table_steps_as_its_scheduler_does(config: dict, num_steps: int, compare):
    compare(f"{config['_class_name']}, {num_steps} steps", *trajectory(config, num_steps), error=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_true_output_gives_the_denoised_sample(config: dict, compare):
    """With the output that belongs to a known clean sample, every step's estimate is that sample."""
    scheduler = schedule.scheduler_from(config)
    table = schedule.probe(scheduler, 6)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1, 16, 3, 5, 7, generator=generator) for _ in range(2))
    for index, timestep in enumerate(table.timesteps):
        if config.get("prediction_type") == "v_prediction":
            signal = scheduler.alphas_cumprod[int(timestep)] ** 0.5
            rest = (1 - signal**2) ** 0.5
            sample, output = signal * clean + rest * noise, signal * noise - rest * clean
        else:
            sigma = scheduler.sigmas[index]
            sample, output = (1 - sigma) * clean + sigma * noise, noise - clean
        state = schedule.initial_state(sample.numpy(), table.num_memory)
        denoised = schedule.advance(state, output.numpy(), table.table[index])[-1]
        compare(f"{config['_class_name']} at {timestep}", np.asarray(denoised), clean.numpy(), error=1e-4)


def test_a_solver_that_is_not_linear_is_refused():
    config = {"_class_name": "UniPCMultistepScheduler", **FLOW, "thresholding": True}
    with pytest.raises(NotImplementedError, match="dynamic thresholding"):
        schedule.probe(schedule.scheduler_from(config), 4)


def test_a_solver_that_needs_more_is_refused():
    with pytest.raises(NotImplementedError, match="CogVideoXDPMScheduler is not supported: its step also needs old_pr"):
        schedule.probe(schedule.scheduler_from({"_class_name": "CogVideoXDPMScheduler"}), 4)


def test_an_unknown_scheduler_is_named():
    with pytest.raises(ValueError, match="the checkpoint's scheduler is NoSuchScheduler, which this version"):
        schedule.scheduler_from({"_class_name": "NoSuchScheduler"})


def test_a_solver_that_gives_no_number_is_refused():
    """bh1 divides by an infinite step where the last sigma is zero, upstream as here."""
    with pytest.raises(ValueError, match="UniPCMultistepScheduler gives no finite step"):
        schedule.probe(schedule.scheduler_from({**CONFIGS["unipc"], "solver_type": "bh1"}), 4)

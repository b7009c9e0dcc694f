"""Solver tables against the upstream schedulers that they were read from, on random trajectories."""

import inspect
import re

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import NETWORK, OPERATION
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.programs import solver_table

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
    "dpm of CogVideoX": {
        "_class_name": "CogVideoXDPMScheduler", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
        "snr_shift_scale": 1.0, "timestep_spacing": "trailing",
    },
    "dpm++ with noise": {"_class_name": "DPMSolverMultistepScheduler", **FLOW, "algorithm_type": "sde-dpmsolver++"},
    "ddpm": {"_class_name": "DDPMScheduler", "prediction_type": "v_prediction", "clip_sample": False},
    "ddim": {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "clip_sample": False},
    "ddim of noise": {"_class_name": "DDIMScheduler", "prediction_type": "epsilon", "clip_sample": False},
    "ddim of samples": {"_class_name": "DDIMScheduler", "prediction_type": "sample", "clip_sample": False},
}  # fmt: skip


SHAPE = (1, 16, 3, 5, 7)


def trajectory(config: dict, num_steps: int, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The upstream scheduler's last sample and the table's from step `begin` on; outputs depend on the sample."""
    table = solver_table.tabulate(solver_table.build_scheduler(config), num_steps, begin)
    upstream = solver_table.build_scheduler(config)
    upstream.set_timesteps(num_steps)
    if hasattr(upstream, "set_begin_index"):
        upstream.set_begin_index(begin)
    assert (table.timesteps == upstream.timesteps.numpy()).all()
    sample, *outputs = torch.randn(1 + num_steps, *SHAPE, generator=torch.Generator().manual_seed(num_steps))
    state = solver_table.initial_state(sample.numpy(), table.num_memory)
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    noises = table.draw_noises(lambda: torch.randn(SHAPE, generator=ours).numpy(), range(begin, num_steps))
    estimate = last = None
    for index, (timestep, noise) in enumerate(zip(upstream.timesteps[begin:], noises, strict=True), begin):
        state = solver_table.insert_noise(tuple(state), noise)
        *state, _ = solver_table.advance(state, np.asarray(outputs[index].numpy() + 0.3 * state[0]), table.table[index])
        output = outputs[index] + 0.3 * sample
        if config["_class_name"] == "CogVideoXDPMScheduler":
            sample, estimate = upstream.step(output, estimate, timestep, last, sample, generator=theirs)
            last = timestep
        else:
            drawn = {"generator": theirs} if "generator" in inspect.signature(upstream.step).parameters else {}
            sample = upstream.step(output, timestep, sample, return_dict=False, **drawn)[0]
    return np.asarray(state[0]), sample.numpy()


@pytest.mark.parametrize("num_steps", [1, 2, 6, 50])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_solver_table_matches_upstream_scheduler(config: dict, num_steps: int, compare):
    compare(f"{config['_class_name']}, {num_steps} steps", *trajectory(config, num_steps), error=NETWORK)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_solver_table_from_later_step_matches_upstream_scheduler(config: dict, compare):
    compare(f"{config['_class_name']}, from the third of 6 on", *trajectory(config, 6, begin=2), error=NETWORK)
    whole, later = (solver_table.tabulate(solver_table.build_scheduler(config), 6, begin) for begin in (0, 2))
    assert (whole.begin, later.begin) == (0, 2) and (later.timesteps == whole.timesteps).all()
    assert later.table.shape == whole.table.shape and not later.table[:2].any() and not later.levels[:2].any()
    assert (later.levels[2:] == whole.levels[2:]).all()
    assert later.draws[:2] == ((), ()) if later.draws else not whole.draws
    assert later.table.dtype == later.levels.dtype == np.float32
    is_whole = not config["_class_name"].startswith("FlowMatch")
    assert later.timesteps.dtype == (np.int32 if is_whole else np.float32)


def test_solver_table_width_matches_solver_memory():
    """The sample, the output, each remembered tensor, the noise."""
    widths = {
        name: solver_table.tabulate(solver_table.build_scheduler(CONFIGS[name]), 3).table.shape for name in CONFIGS
    }
    assert {name: widths[name] for name in ("euler", "dpm++", "dpm++ with noise", "unipc order 3")} == {
        "euler": (3, 2, 2), "dpm++": (3, 4, 4), "dpm++ with noise": (3, 5, 5), "unipc order 3": (3, 6, 6),
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_solver_table_true_output_gives_clean_sample(config: dict, compare):
    """With the output that belongs to a known clean sample, every step's estimate is that sample."""
    scheduler = solver_table.build_scheduler(config)
    table = solver_table.tabulate(scheduler, 6)
    clean, noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    for index, timestep in enumerate(table.timesteps):
        if config.get("prediction_type") in ("v_prediction", "epsilon", "sample"):
            signal = scheduler.alphas_cumprod[int(timestep)] ** 0.5
            rest = (1 - signal**2) ** 0.5
            outputs = {"v_prediction": signal * noise - rest * clean, "epsilon": noise, "sample": clean}
            sample, output = signal * clean + rest * noise, outputs[config["prediction_type"]]
        else:
            sigma = scheduler.sigmas[index]
            sample, output = (1 - sigma) * clean + sigma * noise, noise - clean
        state = solver_table.initial_state(sample.numpy(), table.num_memory)
        denoised = solver_table.advance(state, output.numpy(), table.table[index])[-1]
        compare(f"{config['_class_name']} at {timestep}", np.asarray(denoised), clean.numpy(), error=OPERATION)


def test_tabulate_dynamic_thresholding_raises_not_implemented():
    config = {"_class_name": "UniPCMultistepScheduler", **FLOW, "thresholding": True}
    with raises_message(NotImplementedError, "program.dynamic_thresholding_unsupported"):
        solver_table.tabulate(solver_table.build_scheduler(config), 4)


def test_tabulate_unsupported_scheduler_raises_not_implemented():
    with raises_message(
        NotImplementedError,
        "program.scheduler_unsupported",
        type="RePaintScheduler",
        others=re.compile(r"^original_im"),
    ):
        solver_table.tabulate(solver_table.build_scheduler({"_class_name": "RePaintScheduler"}), 4)


def test_draw_noises_matches_upstream_number_of_draws():
    """CogVideoX's solver draws twice at the inner steps, and uses the second."""
    table = solver_table.tabulate(solver_table.build_scheduler(CONFIGS["dpm of CogVideoX"]), 5)
    assert table.draws == ((True,), (False, True), (False, True), (False, True), (False,))
    drawn = iter(range(99))
    assert list(table.draw_noises(lambda: next(drawn))) == [0, 2, 4, 6, None]
    still = solver_table.tabulate(solver_table.build_scheduler(CONFIGS["euler"]), 3)
    assert list(still.draw_noises(lambda: next(drawn))) == [None] * 3 and next(drawn) == 8


def test_build_scheduler_unknown_class_raises_value_error():
    with raises_message(ValueError, "program.scheduler_missing", name="NoSuchScheduler"):
        solver_table.build_scheduler({"_class_name": "NoSuchScheduler"})


def test_tabulate_non_finite_step_raises_value_error():
    """bh1 divides by an infinite step where the last sigma is zero, upstream as here."""
    with raises_message(ValueError, "program.scheduler_not_finite", type="UniPCMultistepScheduler"):
        solver_table.tabulate(solver_table.build_scheduler({**CONFIGS["unipc"], "solver_type": "bh1"}), 4)

"""A loop that goes on where it was killed, for `train_miniature.py`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm


def optimize(
    file: Path,
    modules: Sequence[nn.Module],
    steps: int,
    rate: float,
    loss: Callable[[int], tuple[Tensor, dict[str, float]]],
    look: Callable[[], None],
    every: int,
) -> None:
    """Trains the first of `modules` for `steps` steps, from where `file` is; the others are kept beside it."""
    optimizer = torch.optim.AdamW(modules[0].parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    done = 0
    if file.is_file():
        state = torch.load(file)
        done = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        for module, saved in zip(modules, state["modules"], strict=True):
            module.load_state_dict(saved)
    bar = tqdm(range(done, steps), file.stem, initial=done, total=steps, mininterval=10)
    for step in bar:
        warm, left = min(1.0, (step + 1) / 200), 1 - step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * min(1.0, 2 * left)  # flat for one half, then down to nothing
        value, report = loss(step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(modules[0].parameters(), 1.0)
        optimizer.step()
        bar.set_postfix({name: f"{number:.3f}" for name, number in report.items()}, refresh=False)
        if (step + 1) % every == 0 or step + 1 == steps:
            states = [module.state_dict() for module in modules]
            save({"step": step + 1, "optimizer": optimizer.state_dict(), "modules": states}, file)
            look()


def save(state: Any, file: Path) -> None:
    """All or nothing, so that being killed loses at most what is not saved yet."""
    scratch = file.with_suffix(".part")
    torch.save(state, scratch)
    os.replace(scratch, file)


def save_sheet(rows: Sequence[np.ndarray], file: Path) -> None:
    """Clips below each other, their frames side by side."""
    lines = [np.concatenate(list(frames), axis=1) for frames in rows]
    Image.fromarray(np.concatenate(lines, axis=0)).save(file)

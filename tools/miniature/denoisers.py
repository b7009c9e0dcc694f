"""Shared parts of denoiser training: bfloat16 products, a position probe, noise, and averaged weights."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .training import optimize, upstream

UNCONDITIONED = 0.1  # of the prompts are empty: what guidance is measured from


class HalfLinear(nn.Linear):
    """A bfloat16 product between float32 activations: twice as fast here, where autocast's norms are slow."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(input.bfloat16(), self.weight.bfloat16(), bias).float()


def quicken(blocks: Iterable[nn.Module]) -> None:
    """Replace linear layers by faster ones for training."""
    for module in itertools.chain.from_iterable(block.modules() for block in blocks):
        if type(module) is nn.Linear:
            module.__class__ = HalfLinear


def begin(blocks: Iterable[nn.Module], silent: Iterable[nn.Linear]) -> None:
    """Initialize the weights of blocks; those in `silent` output zeros at first."""
    for module in itertools.chain.from_iterable(block.modules() for block in blocks):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in silent:
        nn.init.zeros_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Probe(nn.Module):
    """A head that predicts positions from a block's tokens during training, and is dropped afterwards.

    These transformers see positions only as differences, and must infer absolute ones from the borders. They learn this
    much sooner with this probe.
    """

    def __init__(self, block: nn.Module, width: int, grid: tuple[int, ...]) -> None:
        super().__init__()
        self.grid = grid
        self.answers = nn.Linear(width, sum(grid))
        self.asked: Any = None
        block.register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, arguments: Any, result: Any) -> None:
        self.asked = result

    def forward(self, asked: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the error of the predicted positions of `[rows, tokens, width]` in a grid of `sizes`."""
        places = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), -1)
        wanted = places.flatten(0, -2).expand(len(asked), -1, -1)
        answers = self.answers(asked).split(self.grid, dim=-1)
        found: Any = sum(F.cross_entropy(a.flatten(0, 1), wanted[..., n].flatten()) for n, a in enumerate(answers))
        return found


def average_of(denoiser: nn.Module, decay: float = 0.998) -> torch.optim.swa_utils.AveragedModel:
    return torch.optim.swa_utils.AveragedModel(denoiser, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))


def usual_sigmas(random: np.random.Generator, count: int) -> Tensor:
    """Draw noise levels, mostly high ones, which determine content and position."""
    sigma = torch.from_numpy(1 / (1 + np.exp(-random.standard_normal(count, np.float32))))
    return 3 * sigma / (1 + 2 * sigma)


def texts_of(random: np.random.Generator, chosen: np.ndarray, empty: int) -> Tensor:
    """Return the prompts' numbers, some replaced by that of the `empty` prompt."""
    return torch.from_numpy(np.where(random.random(len(chosen)) < UNCONDITIONED, empty, chosen))


def straight(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the flow-matching weights of clean latents and noise in the input at `sigma`, and in the velocity."""
    return 1 - sigma, sigma, -torch.ones_like(sigma), torch.ones_like(sigma)


def learn(
    denoiser: nn.Module,
    averaged: torch.optim.swa_utils.AveragedModel,
    file: Path,
    seed: int,
    steps: int,
    rate: float,
    batch: Callable[[int, np.random.Generator], tuple[Tensor, Tensor, Mapping[str, Any]]],
    look: Callable[[], None],
    counted: Callable[[Tensor], Tensor] = lambda x: x,
    path: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = straight,
) -> None:
    """Train a denoiser to predict the velocity between latents and noise.

    batch: `batch(step, random)` returns clean latents, the time of each on the `path` to noise, and further arguments
    of the denoiser, which returns velocities and the probe's error. counted: selects the parts of a velocity that
    count.
    """

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        averaged.update_parameters(denoiser)
        random = np.random.default_rng((seed, step))
        clean, time, given = batch(step, random)
        noise = torch.from_numpy(random.standard_normal(clean.shape, np.float32))
        kept, added, *speeds = (share.reshape(-1, *(1,) * (clean.ndim - 1)) for share in path(time))
        velocity, where = denoiser(kept * clean + added * noise, time, **given)
        error = F.mse_loss(counted(velocity), counted(speeds[0] * clean + speeds[1] * noise))
        return error + 0.05 * where, {"error": error.item(), "where": where.item()}

    optimize(file, [denoiser, averaged], steps, rate, loss, look, every=600)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to neighbouring pairs, as in `WanAttnProcessor`."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)


def scheduler(config: Mapping[str, Any]) -> Any:
    return getattr(upstream, config["_class_name"]).from_config({k: v for k, v in config.items() if k != "_class_name"})


# --- with and without a given first frame: one network, whose first product alone differs -----------------------------


def widened(transformer: Any, first: str, starts: Sequence[int], **config: Any) -> Any:
    """Return the network with more `in_channels`; latents from each of `starts` on have the sample's weights.

    With zero weights, the position of the given image was not learnt in 400 steps. first: the weight that reads
    channels.
    """
    wide = type(transformer).from_config({**transformer.config, **config})
    weights = {**wide.state_dict(), **transformer.state_dict()}
    kernel = transformer.state_dict()[first].unflatten(1, (transformer.config.in_channels, -1))
    found = torch.zeros(len(kernel), config["in_channels"], *kernel.shape[2:])
    for start in starts:
        found[:, start : start + kernel.shape[1]] = kernel
    wide.load_state_dict({**weights, first: found.view(wide.state_dict()[first].shape)})
    return wide


def narrowed(transformer: Any, first: str, channels: int, **config: Any) -> Any:
    """Return the network for no given image, with the first `channels`, which are the sample's."""
    narrow = type(transformer).from_config({**transformer.config, "in_channels": channels, **config})
    weights, wanted = transformer.state_dict(), narrow.state_dict()
    kernel = weights[first].unflatten(1, (transformer.config.in_channels, -1))[:, :channels]
    narrow.load_state_dict({**{name: weights[name] for name in wanted}, first: kernel.reshape(wanted[first].shape)})
    return narrow


def rates_of(prompts: Sequence[str], hardest: Mapping[str, float]) -> np.ndarray:
    """Return how often each clip is used: more often with a part of `hardest`."""
    return np.array([math.prod(more for part, more in hardest.items() if part in one) for one in prompts])


def chosen(random: np.random.Generator, rates: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` clips for a step."""
    return random.choice(len(rates), count, replace=False, p=rates / rates.sum())

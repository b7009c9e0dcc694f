"""A training loop that resumes after an interruption."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.models.common import causal
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from PIL import Image
from tokenizers import Tokenizer, normalizers
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import AdamW, Muon
from tqdm import tqdm

upstream: Any = diffusers  # its classes appear when they are asked for, which no type checker sees


def shipped(name: str) -> Path:
    """Return the folder of the pack's tiny model of that name, complete, as a start for another one."""
    found = tiny.find_trained(f"tiny/{name}")
    assert found is not None, name
    return found


def without_case(tokenizer: Path) -> None:
    """Make a tokenizer ignore case: a tiny model's words are in lower case."""
    file = str(tokenizer / "tokenizer.json")
    found = Tokenizer.from_file(file)
    before = [] if found.normalizer is None else [found.normalizer]
    found.normalizer = normalizers.Sequence([*before, normalizers.Lowercase()])
    found.save(file)


def qwen_tokenizer(folder: Path, words: Sequence[str], others: Sequence[str], **options: Any) -> Any:
    """Return the tokenizer in `folder`, which is written if it is missing.

    Each of `words` is a token, also with a capital letter, because the class ignores a lower-case normalizer. Each word
    of `others` is a token too.
    """
    if not folder.is_dir():
        forms = [form for word in words for form in (word, word.capitalize())]
        known = [*others, *forms, *(f" {form}" for form in forms)]
        causal.write_qwen_tokenizer(folder, texts=known * 4, vocab_size=1000, **options)
    return load_tokenizer(folder)


def without_capitals(tokenizer: Any, embeddings: Tensor, words: Sequence[str]) -> None:
    """Give capitalized `words` the `embeddings`, `[tokens, dim]`, of the others."""
    for word in (*words, *(f" {one}" for one in words)):
        ((large,), (small,)) = tokenizer([word.title(), word])["input_ids"]
        embeddings[large] = embeddings[small]


# In the names of what is in transformer blocks.
BLOCKS = (".block.", "blocks.", ".layers.")


def optimize(
    file: Path,
    modules: Sequence[nn.Module],
    steps: int,
    rate: float,
    loss: Callable[[int], tuple[Tensor, dict[str, float]]],
    look: Callable[[], None],
    every: int,
) -> None:
    """Train the first of `modules` for `steps` steps, resuming from `file`; the others are saved with it."""
    optimizers = optimizers_of(modules[0], rate)
    done = 0
    if file.is_file():
        state = torch.load(file)
        done = state["step"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for module, saved in zip(modules, state["modules"], strict=True):
            module.load_state_dict(saved)
    bar = tqdm(range(done, steps), file.stem, initial=done, total=steps, mininterval=10)
    for step in bar:
        warm, left = min(1.0, (step + 1) / 200), 1 - step / steps
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = group["initial_lr"] * warm * min(1.0, 2 * left)  # flat for one half, then down to nothing
        value, report = loss(step)
        modules[0].zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(modules[0].parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        bar.set_postfix({name: f"{number:.3f}" for name, number in report.items()}, refresh=False)
        if (step + 1) % every == 0 or step + 1 == steps:
            state = {"step": step + 1, "modules": [module.state_dict() for module in modules]}
            save({**state, "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, file)
            look()


def optimizers_of(module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon (arXiv:2502.16982) for the products in transformer blocks, AdamW for the rest.

    Muon's steps are made as large as AdamW's; at twice the rate about 500 teach as much as 850 of AdamW (docs/LOG.md).
    """
    modules = [one for name, one in module.named_modules() if any(part in name for part in BLOCKS)]
    weights = [
        weight
        for one in modules
        if isinstance(one, nn.Linear | ParametrizationList)
        for weight in one.parameters(recurse=False)
        if weight.ndim == 2 and weight.requires_grad
    ]
    products = list({id(weight): weight for weight in weights}.values())  # some are of several blocks
    kept = set(map(id, products))
    others = [one for one in module.parameters() if one.requires_grad and id(one) not in kept]
    optimizers: list[torch.optim.Optimizer] = [AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)]
    if products:
        optimizers.append(Muon(products, lr=2 * rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["initial_lr"] = group["lr"]
    return optimizers


def save(state: Any, file: Path) -> None:
    """Save atomically, so that an interruption loses only unsaved work."""
    scratch = file.with_suffix(".part")
    torch.save(state, scratch)
    os.replace(scratch, file)


def save_sheet(rows: Iterable[np.ndarray], file: Path) -> None:
    """Save clips below each other, with their frames side by side."""
    lines = [np.concatenate(list(frames), axis=1) for frames in rows]
    Image.fromarray(np.concatenate(lines, axis=0)).save(file)

"""A checkpoint's tokenizer, as its folder holds it; what of a prompt it cuts off, and what is read as it stands."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from .files import CheckpointError, read_json

if TYPE_CHECKING:
    import numpy as np

    from .model_spec import TextEncoding

TOKENIZER = "tokenizer.json"
# Where processors had their template before it had a file of its own; tokenizers do not look there.
TEMPLATE = "chat_template.json"
# What has a meaning in prompts elsewhere. A time or a ratio in parentheses is no weight, and JSON is no choice.
LITERAL = {
    "a weight": re.compile(r"(?<!\\)\([^()]*[^()\d\s:]\s*:\s*[+-]?(?:\d?\.\d+|\d)\s*\)"),
    "a choice": re.compile(r"(?<!\\)\{[^{}\"|]*\|[^{}\"]*\}"),
    "an embedding": re.compile(r"\bembedding:[^\s,()]+"),
}
SHOWN = 60  # characters
_WORD = re.compile(r"\w+")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, with the chat template that is in it.

    A `tokenizer.json` is used as it stands, as transformers 4 did it. By the name of a class, transformers 5 takes the
    vocabulary out of it and recreates the rest: a T5Tokenizer has its unknown token at 2, UMT5's is at 3. Without that
    file (a SentencePiece model alone, or bytes) the class is asked; one that comes with the checkpoint as code is not.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    upstream = PreTrainedTokenizerFast if (folder / TOKENIZER).is_file() else AutoTokenizer
    try:
        tokenizer = upstream.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever upstream's code makes of files that may hold anything
        if "trust_remote_code" not in str(error):
            raise CheckpointError(
                f"{folder} holds no tokenizer that can be read ({type(error).__name__}: {error}). Download the folder "
                "again."
            ) from error
        raise CheckpointError(
            f"{folder} comes with code of its own, which is never run here. Use a checkpoint whose tokenizer is one of "
            "transformers' own."
        ) from None
    if tokenizer.chat_template is None and (folder / TEMPLATE).is_file():
        tokenizer.chat_template = read_json(folder / TEMPLATE).get("chat_template")
    return tokenizer


def tokenize_chats(
    tokenizer: Any,
    chats: Sequence[Any],
    max_length: int,
    *,
    padding_side: Literal["left", "right"],
    add_generation_prompt: bool,
    template_options: Mapping[str, Any] = MappingProxyType({}),
) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask `[rows, max_length]` int32 of conversations in the tokenizer's template.

    `padding_side` is the model's, not the tokenizer's: where a tokenizer_config.json does not state it, transformers 4
    used the default of the tokenizer's class, and transformers 5 pads every class on the right.
    `template_options` are what this template takes besides the conversation.
    """
    import numpy as np

    if tokenizer.chat_template is None:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: there is no chat template in tokenizer_config.json, chat_template.jinja or "
            f"{TEMPLATE}; the checkpoint is incomplete. Download the folder again."
        )
    tokens = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
        padding="max_length",
        tokenizer_kwargs={"padding_side": padding_side},
        truncation=True,
        max_length=max_length,
        **template_options,
    )
    return tokens["input_ids"].astype(np.int32), tokens["attention_mask"].astype(np.int32)


def literals(prompt: str) -> Iterator[str]:
    """What of a prompt is read as it stands and means more elsewhere: the first of each kind, and the kind."""
    for kind, pattern in LITERAL.items():
        if found := pattern.search(prompt):
            yield f"{shown(found.group())} ({kind})"


def cut_off(text: "TextEncoding", tokenizer: Any, prompt: str) -> tuple[int, str]:
    """How many tokens of a prompt in its conversation a text encoder does not take, and the prompt's words in them."""
    import numpy as np

    (kept,), _ = text.tokenize(tokenizer, [prompt])
    # A character is at most four bytes, and a token at least one.
    ids, masks = text.tokenize(tokenizer, [prompt, ""], length=text.max_length + 4 * len(prompt))
    prefix = np.ones(text.prefix, bool)
    full, empty = (row[np.concatenate([prefix, mask.astype(bool)])] for row, mask in zip(ids, masks, strict=True))
    if len(full) <= len(kept):
        return 0, ""
    # Some tokenizers put a last token behind what they cut; a conversation goes on behind the prompt.
    start = _equal(kept, full)
    end = len(full) - _equal(full[::-1], empty[::-1])
    return len(full) - len(kept), tokenizer.decode(full[start:end], skip_special_tokens=True).strip()


def unknown(tokenizer: Any, prompt: str) -> Iterator[str]:
    """The words of a prompt that a tokenizer has no token of their own for, each once: of a trained miniature, what it
    never saw.
    """
    for word in dict.fromkeys(_WORD.findall(prompt)):
        # Behind another, as tokenizers tell a word from a part of one.
        if len(tokenizer.tokenize(f"a {word}")) > 2:
            yield word


def _equal(ones: Iterable[Any], others: Iterable[Any]) -> int:
    """At how many places from the first on two rows are equal."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False)))


def shown(words: str) -> str:
    """Words of a prompt as a sentence quotes them: of many the first."""
    return repr(words if len(words) <= SHOWN else f"{words[:SHOWN]}...")

"""A checkpoint's tokenizer, as its folder holds it; what of a prompt it cuts off, and what is read as it stands."""

import contextlib
import functools
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
# What has a meaning in prompts elsewhere. A time or a ratio in parentheses is no weight, and JSON is no choice.
LITERAL = {
    "a weight": re.compile(r"(?<!\\)\([^()]*[^()\d\s:]\s*:\s*[+-]?(?:\d?\.\d+|\d)\s*\)"),
    "a choice": re.compile(r"(?<!\\)\{[^{}\"|]*\|[^{}\"]*\}"),
    "an embedding": re.compile(r"\bembedding:[^\s,()]+"),
}
# Regular expressions of published tokenizers, and of those that transformers makes of published files. Others may take
# time without end, or end the thread: Qwen 2's, Mistral's, Qwen 3.5's, an earlier one, Llama 3's, GPT-2's.
WORDS_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = frozenset(
    [
        WORDS_QWEN2,
        WORDS_TEKKEN,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(" {2,}", r"\s{2,}|[\n\r\t]", r"\s+", r"\n", r"[\n\r\t]", r"\A +| +\z", "^▁+$", r"\A▁", " +▁"),
    ]
)
# Where processors had their template before it had a file of its own; tokenizers do not look there.
TEMPLATE = "chat_template.json"
# What begins a turn in a template.
_TURN = re.compile(r"<\|im_start\|>|\[INST\]")
# Parts of a tokenizer.json that may hold regular expressions.
_WITH_PATTERNS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Numbers of a tokenizer_config.json by which transformers makes tokens; published ones have 300 at most.
_COUNTS = ("extra_ids", "offset", "num_madeup_words")
MOST_MADE = 4096
SHOWN = 60  # characters
_WORD = re.compile(r"\w+")


@contextlib.contextmanager
def guarded(source: object) -> Iterator[None]:
    """Makes a sentence of a panic of the tokenizers' Rust code, which is no `Exception` and would end the thread.

    `source` is the file or folder that the tokenizer is from. Raises `CheckpointError`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"The tokenizer of {source} failed on this text ({str(error)[:200]}); a published one takes any text. "
            "Download it again."
        ) from None


class Tokenizer:
    """A tokenizer of transformers whose calls are all `guarded`."""

    def __init__(self, own: Any, folder: Path) -> None:
        self._own, self._folder = own, folder

    def __call__(self, *args: Any, **options: Any) -> Any:
        with guarded(self._folder):
            return self._own(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and pickles look for
            raise AttributeError(name)
        with guarded(self._folder):
            found = getattr(self._own, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            with guarded(self._folder):
                return found(*args, **options)

        return call


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, with the text of the chat template that is in it, which is never run.

    A `tokenizer.json` is used as it stands, as transformers 4 did it. By the name of a class, transformers 5 takes the
    vocabulary out of it and recreates the rest: a T5Tokenizer has its unknown token at 2, UMT5's is at 3. Without that
    file (a SentencePiece model alone, or bytes) the class is asked; one that comes with the checkpoint as code is not.

    Raises `CheckpointError` for files that hold none, or one with a regular expression or a number that no published
    tokenizer has.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _check_patterns(folder / TOKENIZER)
    _check_counts(folder / "tokenizer_config.json")
    upstream = PreTrainedTokenizerFast if (folder / TOKENIZER).is_file() else AutoTokenizer
    try:
        with guarded(folder):
            tokenizer = upstream.from_pretrained(folder, trust_remote_code=False)
    except CheckpointError:
        raise
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
    if isinstance(named := tokenizer.chat_template, dict):
        tokenizer.chat_template = named.get("default")
    return Tokenizer(tokenizer, folder)


def _check_patterns(path: Path) -> None:
    said = read_json(path) if path.is_file() else {}
    waiting = [said.get(part) for part in _WITH_PATTERNS]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("Regex"), str):
                check_pattern(pattern, path)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def check_pattern(pattern: object, source: object) -> None:
    """Raises `CheckpointError` for a regular expression that no published tokenizer has."""
    if pattern not in PATTERNS:
        raise CheckpointError(
            f"{source} cuts text by the regular expression {str(pattern)[:SHOWN]!r}, which no published tokenizer of "
            "these models has; an unknown one may never end. Use the tokenizer that the model was published with."
        )


def _check_counts(path: Path) -> None:
    said = read_json(path) if path.is_file() else {}
    for name in _COUNTS:
        if isinstance(count := said.get(name), int | float) and not -1 <= count <= MOST_MADE:
            raise CheckpointError(
                f"{path}: {name} is {str(count)[:SHOWN]}; it may be {MOST_MADE} at most, and published ones are 300 or "
                "less. Download the folder again."
            )


def tokenize_chats(
    tokenizer: Any,
    chats: Sequence[Any],
    max_length: int,
    *,
    padding_side: Literal["left", "right"],
    template: str,
    add_generation_prompt: bool,
    template_options: Mapping[str, Any] = MappingProxyType({}),
) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask `[rows, max_length]` int32 of conversations in a template, the family's.

    A template is a program: that of a model's folder, which anyone may have written, is never run. It is looked at, so
    that a tokenizer of another kind of model is refused.
    `padding_side` is the model's, not the tokenizer's: where a tokenizer_config.json does not state it, transformers 4
    used the default of the tokenizer's class, and transformers 5 pads every class on the right.
    `template_options` are what this template takes besides the conversation.
    """
    import numpy as np

    if (own := tokenizer.chat_template) is None:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: there is no chat template in tokenizer_config.json, chat_template.jinja or "
            f"{TEMPLATE}; the checkpoint is incomplete. Download the folder again."
        )
    turn = _TURN.search(template)
    if not isinstance(own, str) or (turn and turn.group() not in own):
        raise CheckpointError(
            f"{tokenizer.name_or_path} has another chat template, {shown(str(own))}; that of this model has "
            f"{turn and turn.group()} before each turn. Use the tokenizer that the model was published with."
        )
    tokens = tokenizer.apply_chat_template(
        chats,
        chat_template=template,
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

"""A checkpoint's tokenizer, its truncation of prompts, and syntax in prompts that has no effect here."""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from .files import CheckpointError, read_json
from .messages import compose

if TYPE_CHECKING:
    import numpy as np

    from .model_spec import TextEncoding

TOKENIZER = "tokenizer.json"
# Prompt syntax of other programs. A time or ratio in parentheses is not a weight, and JSON is not a choice.
LITERAL_SYNTAX = {
    "a weight": re.compile(r"(?<!\\)\([^()]*[^()\d\s:]\s*:\s*[+-]?(?:\d?\.\d+|\d)\s*\)"),
    "a choice": re.compile(r"(?<!\\)\{[^{}\"|]*\|[^{}\"]*\}"),
    "an embedding": re.compile(r"\bembedding:[^\s,()]+"),
}
# Allowed regular expressions: of published tokenizers, and those that transformers makes of published files. Others may
# never end, or end the thread. In order: Qwen 2, Mistral, Qwen 3.5, an earlier one, Llama 3, GPT-2.
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
# Older file of a processor's template, which tokenizers do not read.
TEMPLATE = "chat_template.json"
# Start of a turn in a template.
_TURN = re.compile(r"<\|im_start\|>|\[INST\]")
# Parts of a tokenizer.json that may hold regular expressions.
_WITH_PATTERNS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Numbers of tokens in a tokenizer_config.json that transformers creates; published ones are at most 300.
_COUNTS = ("extra_ids", "offset", "num_madeup_words")
MAX_EXTRA_TOKENS = 4096
MAX_QUOTE_LENGTH = 60  # characters
# Characters of a prompt that are examined, more than any text encoder takes: a search of a long text, or a list of a
# million tokens, would keep every other thread waiting.
MAX_COUNTED = 100_000
_WORD = re.compile(r"\w+")


@contextlib.contextmanager
def guard_panics(source: object) -> Iterator[None]:
    """Raise panics of the tokenizers' Rust code as `CheckpointError`.

    A panic is not an `Exception` and would end the thread.

    source: file or folder of the tokenizer.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(compose("tokenizer.failed", source=source, error=str(error)[:200])) from None


class GuardedTokenizer:
    """A tokenizer of transformers whose calls are all `guarded`."""

    def __init__(self, upstream: Any, folder: Path) -> None:
        self._own, self._folder = upstream, folder

    def __call__(self, *args: Any, **options: Any) -> Any:
        with guard_panics(self._folder):
            return self._own(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by copy and pickle
            raise AttributeError(name)
        with guard_panics(self._folder):
            attribute = getattr(self._own, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **options: Any) -> Any:
            with guard_panics(self._folder):
                return attribute(*args, **options)

        return call


def load_tokenizer(folder: Path) -> GuardedTokenizer:
    """Return the tokenizer of a folder, with the text of its chat template, which is never run.

    A `tokenizer.json` is used unchanged, as transformers 4 did it. By class name, transformers 5 extracts the
    vocabulary and recreates the rest: a T5Tokenizer has its unknown token at 2, UMT5's is at 3. Without that file (a
    SentencePiece model alone, or bytes) the class is used, unless it is code of the checkpoint.
    Raises `CheckpointError` for other files, and for a regular expression or a number that no published tokenizer has.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _check_patterns(folder / TOKENIZER)
    _check_counts(folder / "tokenizer_config.json")
    upstream = PreTrainedTokenizerFast if (folder / TOKENIZER).is_file() else AutoTokenizer
    try:
        with guard_panics(folder):
            tokenizer = upstream.from_pretrained(folder, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:  # any error of upstream's code on untrusted files
        if "trust_remote_code" not in str(error):
            raise CheckpointError(
                compose("tokenizer.unreadable", folder=folder, error_type=type(error).__name__, error=error)
            ) from error
        raise CheckpointError(compose("tokenizer.own_code", folder=folder)) from None
    if tokenizer.chat_template is None and (folder / TEMPLATE).is_file():
        tokenizer.chat_template = read_json(folder / TEMPLATE).get("chat_template")
    if isinstance(named := tokenizer.chat_template, dict):
        tokenizer.chat_template = named.get("default")
    return GuardedTokenizer(tokenizer, folder)


def _check_patterns(path: Path) -> None:
    document = read_json(path) if path.is_file() else {}
    waiting = [document.get(part) for part in _WITH_PATTERNS]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("Regex"), str):
                check_pattern(pattern, path)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def check_pattern(pattern: object, source: object) -> None:
    """Raise `CheckpointError` for a regular expression that no published tokenizer has; `source` is for the message."""
    if pattern not in PATTERNS:
        raise CheckpointError(compose(
            "tokenizer.pattern_unknown", source=source, pattern=repr(str(pattern)[:MAX_QUOTE_LENGTH]),
        ))  # fmt: skip


def _check_counts(path: Path) -> None:
    config = read_json(path) if path.is_file() else {}
    for name in _COUNTS:
        if isinstance(count := config.get(name), int | float) and not -1 <= count <= MAX_EXTRA_TOKENS:
            raise CheckpointError(compose(
                "tokenizer.too_many_extra_tokens", path=path, name=name, count=str(count)[:MAX_QUOTE_LENGTH],
                max_extra_tokens=MAX_EXTRA_TOKENS,
            ))  # fmt: skip


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
    """Return ids and mask `[rows, max_length]` int32 of conversations in the family's template.

    tokenizer: of the folder. Its own template is untrusted and never run, only checked for the kind of model.
    chats: conversations, as transformers has them.
    max_length: tokens, after truncation and padding.
    padding_side: of the model. A tokenizer_config.json may not state it, and the default differs between transformers 4
        and 5.
    template: of the family, which is run.
    add_generation_prompt: whether the assistant's turn is begun.
    template_options: further variables of the template.
    """
    import numpy as np

    if (own_template := tokenizer.chat_template) is None:
        raise CheckpointError(compose(
            "tokenizer.no_chat_template", name_or_path=tokenizer.name_or_path, template=TEMPLATE,
        ))  # fmt: skip
    turn = _TURN.search(template)
    if not isinstance(own_template, str) or (turn and turn.group() not in own_template):
        raise CheckpointError(compose(
            "tokenizer.chat_template_differs", name_or_path=tokenizer.name_or_path,
            own_template=quote_truncated(str(own_template)), turn=turn and turn.group(),
        ))  # fmt: skip
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


def find_literal_syntax(prompt: str) -> Iterator[str]:
    """Yield syntax of other programs in a prompt, the first of each kind, with the kind."""
    for kind, pattern in LITERAL_SYNTAX.items():
        if match := pattern.search(prompt, 0, MAX_COUNTED):
            yield f"{quote_truncated(match.group())} ({kind})"


def count_truncated(text: "TextEncoding", tokenizer: Any, prompt: str) -> tuple[int, str]:
    """Return how many tokens of a prompt the text encoder truncates, and the start of their text.

    text: the encoding.
    tokenizer: of the text encoder.
    prompt: a text; of a longer one than `MAX_COUNTED` characters, those are counted.
    """
    import numpy as np

    prompt = prompt[:MAX_COUNTED]
    (kept,), _ = text.tokenize(tokenizer, [prompt])
    prefix = np.ones(text.prefix, bool)

    def tokens(prompt: str, length: int) -> "np.ndarray[Any, Any]":
        (row,), (mask,) = text.tokenize(tokenizer, [prompt], length=length)
        return row[np.concatenate([prefix, mask.astype(bool)])]

    # A character is at most four bytes, and a token at least one. Few texts need that many.
    length, most = text.max_length + len(prompt) // 2, text.max_length + 4 * len(prompt)
    while len(full := tokens(prompt, length)) >= length and length < most:
        length = min(2 * length, most)
    empty = tokens("", text.max_length)
    if len(full) <= len(kept):
        return 0, ""
    # Some tokenizers append a last token after truncation; a conversation continues after the prompt.
    start = _equal(kept, full)
    end = len(full) - _equal(full[::-1], empty[::-1])
    shown = full[start : min(end, start + 4 * MAX_QUOTE_LENGTH)]
    return len(full) - len(kept), tokenizer.decode(shown, skip_special_tokens=True).strip()


def find_unknown_words(tokenizer: Any, prompt: str) -> Iterator[str]:
    """Yield the words of a prompt that are not single tokens, each once.

    A trained tiny model has never seen these words.
    """
    for word in dict.fromkeys(_WORD.findall(prompt[:MAX_COUNTED])):
        # After another word, so that tokenizers treat it as a whole word.
        if len(tokenizer.tokenize(f"a {word}")) > 2:
            yield word


def _equal(ones: Iterable[object], others: Iterable[object]) -> int:
    """Return how many leading elements of two sequences are equal."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False)))


def quote_truncated(words: str) -> str:
    """Return the `repr` of words, truncated to `SHOWN` characters."""
    return repr(words if len(words) <= MAX_QUOTE_LENGTH else f"{words[:MAX_QUOTE_LENGTH]}...")

"""Text and tokens of a served engine: one token per byte, so that any language can make the same tokens in one line.

The chat template writes `<role>content</>` for each message and `<assistant>` at the end. So the tokens of a longer
chat begin with those of the shorter chat and its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from pytest_kvmock.values.tokens import block_hashes

VOCABULARY: Final = 256
"""Number of token ids, which are the bytes of UTF-8."""

TEMPLATE: Final = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The chat template, in the form of Hugging Face tokenizers."""

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
"""The characters of generated tokens and of generated texts for tests."""


def encode(text: str) -> tuple[int, ...]:
    """Return the tokens of a text, one per byte of its UTF-8; a lone surrogate becomes "?"."""
    return tuple(text.encode(errors="replace"))


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens; tokens that are no bytes, and invalid UTF-8, become U+FFFD."""
    out: list[str] = []
    run = bytearray()
    for token in tokens:
        if 0 <= token < VOCABULARY:
            run.append(token)
        else:
            out += run.decode(errors="replace"), "\N{REPLACEMENT CHARACTER}"
            run.clear()
    return "".join((*out, run.decode(errors="replace")))


def chat_text(messages: Iterable[Mapping[str, Any]], *, generates: bool = True) -> str:
    """Return the text of a chat, made with the template.

    Args:
        messages: the messages, each with a role and a content: a text, a list of parts with texts, or None.
        generates: whether to end with the beginning of the answer.
    """
    parts = [f"<{message['role']}>{content_text(message.get('content'))}</>" for message in messages]
    return "".join(parts) + ("<assistant>" if generates else "")


def content_text(content: object) -> str:
    """Return the text of a message's content; a part without text becomes its type in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    assert isinstance(content, Iterable)
    return "".join(
        str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, Mapping) else str(part) for part in content
    )


class Letters(Random):
    """A source of tokens that are letters, with the interface of `Random` that `EngineRequest` uses."""

    def getrandbits(self, k: int, /) -> int:
        """Return the next token."""
        bits = super().getrandbits(32)
        return ord(LETTERS[bits % len(LETTERS)]) if k == 32 else bits


def letters_of(seed: object, prompt: Sequence[int] | None) -> Letters:
    """Return the source of the tokens generated for a prompt; it only depends on seed and prompt."""
    tokens = prompt or ()
    return Letters(f"{seed}:{block_hashes(tokens, max(1, len(tokens)))}")


def write_tokenizer(directory: Path) -> list[str]:
    """Write the tokenizer as Hugging Face files: byte-level BPE without merges, whose ids are the bytes.

    Args:
        directory: the folder; it is made if it is missing.

    Returns:
        The names of the files.

    Raises:
        OSError: the files cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {_byte_character(byte): byte for byte in range(VOCABULARY)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    files: dict[str, Any] = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1_000_000,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1_000_000,
            "torch_dtype": "float16",
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return list(files)


def _byte_character(byte: int) -> str:
    """Return the character for a byte in a byte-level vocabulary (GPT-2): the character itself if it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [each for each in range(VOCABULARY) if each not in printable].index(byte))

"""A tokenizer of made-up words, one token each: what a client draws as n tokens comes back as n tokens."""

from __future__ import annotations

import json
from pathlib import Path

BEGIN, END, UNKNOWN = "<begin>", "<end>", "<unknown>"


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """tokenizer.json and tokenizer_config.json. Raises OSError."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [BEGIN, END, UNKNOWN, *(f"w{i}" for i in range(3, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([BEGIN, END, UNKNOWN])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

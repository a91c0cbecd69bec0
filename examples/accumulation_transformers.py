"""GPT-NeoX and real text for the accumulation example; needs transformers, and downloads nothing.

The model has random weights, 512 positions and a vocabulary of 512 tokens. The text is that of Python's own help
pages, one paragraph a document: headings of a few tokens, and paragraphs of hundreds.
"""

from __future__ import annotations

import random
import re
from importlib.util import find_spec

import torch
from torch import Tensor, nn

VOCABULARY = LENGTH = 512

is_installed = find_spec("transformers") is not None and find_spec("pydoc_data") is not None


def make_paragraphs(length: int = LENGTH) -> list[Tensor]:
    """Return the paragraphs in a fixed order, as the indices of at least 4 and at most ``length`` tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [text for name in sorted(topics) for text in re.split(r"\n\s*\n", topics[name]) if len(text) > 20]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    rows = [torch.tensor(encoding.ids[:length]) for encoding in tokenizer.encode_batch(texts)]
    rows = [row for row in rows if len(row) >= 4]
    random.Random(0).shuffle(rows)
    return rows


def make_neox() -> nn.Module:
    """Return a GPT-NeoX of two layers in float64, the same at every call, without dropout."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **layers, **special, use_cache=False)).double()

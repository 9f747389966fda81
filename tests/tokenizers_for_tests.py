"""Tokenizers for the data tests: the embedded one without BOS, and a byte-level one that starts its sequences with BOS."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pipeline.config import EmbeddedModel
from pipeline.models import train_tokenizer

BOS_CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@lru_cache(maxsize=1)
def embedded_tokenizer() -> Any:
    """The embedded policy's kind of tokenizer: a chat template, an EOS, no BOS."""
    return train_tokenizer(["one two three, how many?"] * 4, EmbeddedModel())


def bos_tokenizer(chat_template: str | None = BOS_CHAT) -> Any:
    """A byte-level tokenizer whose ``encode`` puts ``<s>`` first and ``</s>`` last, like T5's and some Llama's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer

"""Small policies with random weights for the samplers' tests: every attention variant that must work."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from pipeline.config import EmbeddedModel
from pipeline.models import build_embedded

SHAPE = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen2 tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2 untied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "llama, one key head": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "llama, a key head each": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "llama, scaled rotation": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "mistral, sliding window": lambda: MistralConfig(**SHAPE, sliding_window=8),
    "qwen2, window in upper layers": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "gemma2, window and soft caps": lambda: Gemma2Config(**SHAPE, head_dim=16, sliding_window=8),
}


@cache
def policy(name: str, seed: int = 0) -> PreTrainedModel:
    """The same weights each time; logits are spread enough that a wrong mask or position changes the ids."""
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 2:
                # Embeddings, and a tied head with them, stay small enough for several likely tokens.
                scale = 0.4 if "embed" in key or "lm_head" in key else 1.5 * weight.shape[1] ** -0.5
                weight.normal_(0.0, scale, generator=generator)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
    return model.requires_grad_(False)


def prompts(count: int, longest: int = 40, vocabulary: int = 131) -> list[list[int]]:
    """Ragged prompts without end or pad ids."""
    generator = torch.Generator().manual_seed(count)
    lengths = [3 + (7 * i) % (longest - 2) for i in range(count)]
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def embedded_folder(directory: Path, *, tied: bool = True) -> Path:
    """A small embedded policy with its tokenizer, of a shape that vLLM's CPU build takes (heads of 32)."""
    shape = EmbeddedModel(layers=2, width=64, heads=2, kv_heads=1, intermediate=96, vocabulary=300, context=256)
    corpus = [f"{a} + {b} = {a + b}." for a in range(20) for b in range(20)]
    build_embedded(shape, corpus, 0, directory)
    if not tied:
        config = AutoConfig.from_pretrained(directory)
        config.tie_word_embeddings = False
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.generation_config = GenerationConfig.from_pretrained(directory)
        disturb(model, 0)
        model.save_pretrained(directory)
    return directory


def disturb(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Other weights, in place: normal of variance 1 / fan-in, so that several tokens are likely."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return model


def load(directory: Path) -> PreTrainedModel:
    """The float32 model of a folder, for reference computations."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)


def full_logprobs(model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """[T, V] logprobs in float64 of one sequence alone, without any cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / (temperature or 1.0), -1)

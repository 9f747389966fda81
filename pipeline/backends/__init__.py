"""The learning and sampling engines behind pipeline.protocols, opened by name; each loads its libraries when opened."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Recipe
from pipeline.protocols import Learner, Sampler


def open_learner(recipe: Recipe, directory: Path, scratch: Path) -> Learner:
    """The recipe's learner, holding the policy of a checkpoint folder, with a fresh optimizer."""
    if recipe.learner.backend == "deepspeed":
        from pipeline.backends.deepspeed_learner import DeepSpeedLearner

        return DeepSpeedLearner(recipe, directory, scratch)
    from pipeline.backends.torch_learner import TorchLearner

    return TorchLearner(recipe, directory)


def open_sampler(recipe: Recipe, tokenizer_directory: Path, scratch: Path) -> Sampler:
    """The recipe's sampler, holding no policy yet."""
    if recipe.sampler.engine == "vllm":
        from pipeline.backends.vllm_sampler import VLLMSampler

        return VLLMSampler(recipe, tokenizer_directory, scratch)
    from pipeline.backends.transformers_sampler import TransformersSampler

    return TransformersSampler(recipe, tokenizer_directory)

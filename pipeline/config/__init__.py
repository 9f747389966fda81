"""The recipe: one frozen pydantic model a stage, ``Recipe`` on top; TOML in, digest out."""

from pipeline.config.data import DataConfig, EmbeddedData, SourceConfig
from pipeline.config.engines import LearnerConfig, RuntimeConfig, SamplerConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.guards import CostsConfig, GuardsConfig
from pipeline.config.model import EmbeddedModel, ModelConfig
from pipeline.config.recipe import Recipe, load_recipe, recipe_names
from pipeline.config.rewards import RewardConfig, RewardModelConfig
from pipeline.config.section import Section
from pipeline.config.training import (
    AdvantageConfig,
    GRPOConfig,
    ObjectiveConfig,
    RegenerateConfig,
    RejectConfig,
    SFTConfig,
)

__all__ = [
    "AdvantageConfig",
    "CostsConfig",
    "DataConfig",
    "EmbeddedData",
    "EmbeddedModel",
    "EvaluateConfig",
    "GRPOConfig",
    "GuardsConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "Recipe",
    "RegenerateConfig",
    "RejectConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RuntimeConfig",
    "SFTConfig",
    "SamplerConfig",
    "Section",
    "SourceConfig",
    "load_recipe",
    "recipe_names",
]

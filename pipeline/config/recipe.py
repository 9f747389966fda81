"""``Recipe``, and how a TOML file plus ``--set key=value`` becomes one, with errors that name field and way out."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipeline.config.data import DataConfig
from pipeline.config.engines import LearnerConfig, RuntimeConfig, SamplerConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.guards import CostsConfig, GuardsConfig, StageKind
from pipeline.config.model import ModelConfig
from pipeline.config.presets import expand_preset, preset_fields
from pipeline.config.rewards import RewardConfig, RewardModelConfig
from pipeline.config.secret import refuse_secrets
from pipeline.config.section import Section
from pipeline.config.training import GRPOConfig, RegenerateConfig, RejectConfig, SFTConfig

FILLED_IN = ("grpo.objective.temperature", "grpo.objective.max_tokens")
"""Fields that take the sampler's value, so that sampler and learner can never disagree."""
CHANGEABLE = ("trackers", "guards", "costs", "timeouts")
"""Fields on which no stage's work depends: they may change while a run goes on, and are outside the digest."""


class Recipe(Section):
    """Everything a run depends on."""

    name: str = "embedded"
    """Name of the recipe, shown beside the run id."""
    seed: int = Field(default=0, ge=0)
    """Every random choice of the run derives from it."""
    model: ModelConfig = ModelConfig()
    """The base policy."""
    data: DataConfig = DataConfig()
    """Problem sets and their selection."""
    warm_start: SFTConfig = SFTConfig()
    """SFT on worked solutions before reinforcement learning."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """The learnt rewards; trained only when ``rewards.weights`` names them, or process supervision needs one."""
    rewards: RewardConfig = RewardConfig()
    """What a completion is paid for."""
    grpo: GRPOConfig = GRPOConfig()
    """The rounds."""
    reject: RejectConfig = RejectConfig()
    """Rejection sampling after the last round."""
    regenerate: RegenerateConfig = RegenerateConfig()
    """SFT on what was kept."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation after the warm start, after every round, and at the end."""
    sampler: SamplerConfig = SamplerConfig()
    """The engine that samples."""
    learner: LearnerConfig = LearnerConfig()
    """The engine that learns."""
    runtime: RuntimeConfig = RuntimeConfig()
    """The machine."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; after a crash the recorded updates behind the last one are replayed."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Step checkpoints kept on disk; those at the end of a stage or round always stay."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where a run's steps and evaluations are logged too. tensorboard and trackio stay on this machine; wandb sends the
    figures and the recipe to the service, unless WANDB_MODE=offline. They may change while a run goes on."""

    timeouts: dict[StageKind, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Seconds that a stage may take, by kind (rollout, reward, update, refresh, sft, evaluate, …): a stage that takes
    longer, or hangs, ends the run, which can be continued. Kinds that are not named have no limit."""
    guards: GuardsConfig = GuardsConfig()
    """What is watched after every training step."""
    costs: CostsConfig = CostsConfig()
    """What the run may spend."""

    @model_validator(mode="before")
    @classmethod
    def _fill_objective(cls, data: Any) -> Any:
        """Sampler and learner share one temperature and one maximum length: the objective always takes the sampler's."""
        if not isinstance(data, Mapping):
            return data
        sampler = data.get("sampler", {})
        if not isinstance(sampler, Mapping):
            return data
        grpo = data.get("grpo", {})
        objective = grpo.get("objective", {}) if isinstance(grpo, Mapping) else None
        if not isinstance(objective, Mapping):
            return data  # validation says what is wrong with it
        objective = dict(objective)
        for field in ("temperature", "max_tokens"):
            default = SamplerConfig.model_fields[field].default
            value = sampler.get(field, default)
            if objective.setdefault(field, value) != value:
                raise ValueError(
                    f"grpo.objective.{field} is {objective[field]} but sampler.{field} is {value}: "
                    f"remove grpo.objective.{field}, it is filled in from sampler.{field}"
                )
        return {**data, "grpo": {**grpo, "objective": objective}}

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        too_large = [k for k in self.evaluate.ks if k > self.evaluate.samples]
        if too_large:
            raise ValueError(
                f"evaluate.ks has {max(too_large)} but evaluate.samples is {self.evaluate.samples}: pass@k needs at "
                f"least k samples a problem; raise evaluate.samples or lower evaluate.ks"
            )
        if not self.evaluate.ks or min(self.evaluate.ks) < 1:
            raise ValueError("evaluate.ks must name at least one k, each at least 1, for example [1, 8]")
        if self.sampler.vllm.weight_sync == "ipc" and self.learner.backend != "torch":
            raise ValueError(
                f"sampler.vllm.weight_sync is 'ipc', which needs the learner in this process, but learner.backend is "
                f"{self.learner.backend!r}: set sampler.vllm.weight_sync = 'checkpoint' or learner.backend = 'torch'"
            )
        rollouts = self.grpo.problems_per_step * self.grpo.group_size
        if self.grpo.minibatches > self.grpo.problems_per_step:
            raise ValueError(
                f"grpo.minibatches is {self.grpo.minibatches} but a step has {self.grpo.problems_per_step} groups "
                f"({rollouts} rollouts) and groups are not split: use at most grpo.problems_per_step minibatches"
            )
        shape = self.model.embedded
        if shape.width % shape.heads or shape.heads % shape.kv_heads:
            raise ValueError(
                f"model.embedded: heads ({shape.heads}) must divide width ({shape.width}) and kv_heads "
                f"({shape.kv_heads}) must divide heads"
            )
        return self

    @property
    def has_reward_model(self) -> bool:
        """Whether the run trains an outcome reward model; with a weight of 0 it scores and does not pay."""
        return "reward_model" in self.rewards.weights

    @property
    def has_process_model(self) -> bool:
        """Whether the run trains a process reward model, which scores the steps of completions."""
        return "process_model" in self.rewards.weights or self.grpo.advantages.supervision == "process"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over every field but CHANGEABLE ones: two recipes with one digest do the same work."""
        plain = self.model_dump(mode="json", exclude=set(CHANGEABLE))
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("pipeline") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(recipe: str = "embedded", overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a built-in name or a TOML file, with ``key=value`` overrides on top.

    A file may begin with ``base = "NAME"`` and then states only what differs from that recipe. Raises ValueError with
    one line that names the field, what it was, what was expected and the way out.
    """
    return validate_recipe(apply_overrides(_read(recipe), overrides), recipe)


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of plain recipe data with ``key=value`` changes; values are TOML, a bare word is a string."""
    changed = copy.deepcopy(dict(data))
    for override in overrides:
        _override(changed, override)
    return changed


def validate_recipe(data: Mapping[str, Any], origin: str) -> Recipe:
    """``Recipe`` from plain data; raises ValueError with one line instead of pydantic's page."""
    refuse_secrets(data, origin)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"recipe {origin}: " + "; ".join(_explain(detail) for detail in error.errors())) from None


def _read(recipe: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    if recipe in above:
        raise ValueError(
            f"recipe {above[0]}: its bases go in a circle ({' → '.join([*above, recipe])}); remove one base"
        )
    path = Path(recipe)
    if recipe in recipe_names():
        text = (resources.files("pipeline") / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"recipe {recipe}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    elif path.suffix == ".toml":
        raise ValueError(
            f"recipe {recipe}: no such file; name an existing .toml file or one of {', '.join(recipe_names())}"
        )
    else:
        raise ValueError(
            f"recipe {recipe!r} is unknown{_nearest(recipe, recipe_names())}; known: {', '.join(recipe_names())}, or a "
            f"path to a .toml file"
        )
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {recipe}: not valid TOML: {error}") from None
    data = expand_preset(data)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ValueError(f"recipe {recipe}: base is {base!r}, expected the name of a recipe or a .toml file")
    return _merge(_read(base, (*above, recipe)), data)


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        # A table of weights or columns is a whole: naming it replaces it, else a weight could never be removed.
        whole = key in {"weights", "columns", "functions"}
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict) and not whole:
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"--set {override!r}: expected key=value, for example grpo.group_size=16")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set model.name=Qwen/Qwen2.5-0.5B
    if key.strip() in FILLED_IN:
        raise ValueError(
            f"--set {override!r}: {key.strip()} is filled in from sampler.{key.strip().split('.')[-1]}; set that"
        )
    if key.strip() == "grpo.preset":
        data |= _merge(data, {"grpo": preset_fields(value)})
        return
    *parents, last = key.strip().split(".")
    table: Any = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {override!r}: {parent} is not a section of the recipe")
    table[last] = value


def _explain(detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location)
    got = detail.get("input")
    if detail["type"] == "extra_forbidden":
        names = _field_names(location[:-1]) + ["preset"] * (location[:-1] == ["grpo"])
        return f"{field} is not a field of the recipe{_nearest(location[-1], names)}; fields here: {', '.join(names)}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{field} is {got!r}: {message}"


def _field_names(location: list[str]) -> list[str]:
    model: Any = Recipe
    for part in location:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        arguments = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, Section)]
        model = arguments[0] if arguments else annotation
    return sorted(model.model_fields)


def _nearest(word: str, names: list[str]) -> str:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""

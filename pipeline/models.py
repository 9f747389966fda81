"""Model folders: build the embedded policy, resolve a name into a folder, load, save, identify.

Everything here speaks Hugging Face format (config.json, safetensors, tokenizer.json), so that any folder it writes loads
anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import EmbeddedModel, ModelConfig
from pipeline.seeds import derive_seed

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_embedded(shape: EmbeddedModel, corpus: Iterable[str], seed: int, directory: Path) -> Path:
    """Write a Qwen2-shaped policy with random weights, and a tokenizer trained on ``corpus``, into ``directory``.

    The same arguments give the same files byte for byte. Returns ``directory``.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer(corpus, shape)
    pad, end = (tokenizer.get_vocab()[token] for token in (PAD, END))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    _initialise(model, torch.Generator().manual_seed(derive_seed(seed, "embedded policy")))
    model.generation_config = GenerationConfig(eos_token_id=[end], pad_token_id=pad)
    save_model(model, tokenizer, directory)
    return directory


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Fill the weights from the generator alone: normal of variance 1 / fan-in, biases 0, norms 1.

    Variance 1 / fan-in is several times Qwen2's 0.02 at this width; a narrow policy learns to copy digits far sooner.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.fill_(1.0)


def train_tokenizer(corpus: Iterable[str], shape: EmbeddedModel) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with single digits: any text encodes, and decodes back to itself (in NFC form).

    Words are cut as Qwen2 cuts them: whatever the folder says, AutoTokenizer, and vLLM with it, gives every model of
    type qwen2 that class, and with any other cut the ids would change when the folder is loaded.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    empty = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    options: dict[str, Any] = {
        "vocab": trained["vocab"],
        "merges": [tuple(merge) for merge in trained["merges"]],
        "unk_token": None,
        "pad_token": PAD,
        "eos_token": END,
        "extra_special_tokens": [USER, ASSISTANT, SYSTEM],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    return Qwen2Tokenizer(**options)


def load_tokenizer(name: str | Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or Hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(name), revision=_revision(name, config), trust_remote_code=config.trust_remote_code
    )


def load_model(
    name: str | Path, config: ModelConfig, *, device: str = "cpu", train: bool = False, as_stored: bool = False
) -> PreTrainedModel:
    """The causal language model of a folder or Hub name, from safetensors only, in evaluation mode (no dropout).

    With ``train`` the weights are float32 whatever ``config.dtype`` says (bfloat16 is then the type of the forward
    pass), and ask for gradients; without it they have ``config.dtype`` and ask for none. ``as_stored`` leaves them in
    the file's type: on the CPU they then are the file itself, mapped into memory, and take none of their own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.products import use_onednn

    dtype = "auto" if as_stored else torch.float32 if train else getattr(torch, config.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(name),
        revision=_revision(name, config),
        trust_remote_code=config.trust_remote_code,
        use_safetensors=True,
        dtype=dtype,
        attn_implementation="sdpa",
    )
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(train)
    use_onednn(loaded)
    return loaded


def _revision(name: str | Path, config: ModelConfig) -> str:
    return "main" if config.revision is None or Path(name).is_dir() else config.revision


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write weights, configuration and tokenizer into ``directory``, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def eos_token_ids(source: PreTrainedModel | Path) -> frozenset[int]:
    """Every token id that ends a completion, from the generation configuration, else from the model's own.

    ValueError when neither names one: a policy that cannot end would fill every completion to its limit.
    """
    if isinstance(source, Path):
        values = [_json(source / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    else:
        values = [getattr(c, "eos_token_id", None) for c in (getattr(source, "generation_config", None), source.config)]
    found = next((v for v in values if v is not None and v != []), None)
    if found is None:
        where = source if isinstance(source, Path) else source.config._name_or_path or type(source).__name__
        raise ValueError(f"model {where}: no eos_token_id in generation_config.json or config.json; add one")
    return frozenset(found) if isinstance(found, list | tuple) else frozenset({int(found)})


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def weights_checksum(model: nn.Module) -> str:
    """16 hexadecimal digits over names, shapes, types and bytes of the parameters, wherever they lie.

    Tied parameters count once; modules wrapped around the model change the names and so the digits.
    """
    return combine_checksums({name: tensor_digest(name, weight) for name, weight in model.named_parameters()})


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """A digest of one named tensor: its name, shape, type and bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{name} {tuple(flat.shape)} {flat.dtype}\n".encode())
    digest.update(flat.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def combine_checksums(digests: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits over named digests, the same in whatever order the tensors came."""
    return hashlib.blake2b(b"".join(digests[name] for name in sorted(digests)), digest_size=8).hexdigest()


def prepare_base(
    config: ModelConfig, corpus: Iterable[str], seed: int, directory: Path, *, chat_template: bool = True
) -> Path:
    """The local folder of the base policy, complete and checked.

    "embedded" and "smollm2" are written into ``directory`` (once: a complete folder there is used as it is); a local
    folder is used where it lies; a Hub name is downloaded into the Hub's own cache. ValueError, in one line, for a
    folder that lacks weights, a tokenizer or (with ``chat_template``) a chat template.
    """
    if config.name == "embedded":
        return directory if _is_complete(directory) else build_embedded(config.embedded, corpus, seed, directory)
    if config.name == "smollm2":
        from pipeline.smollm2 import convert_smollm2

        return directory if _is_complete(directory) else convert_smollm2(directory)
    local = Path(config.name).expanduser()
    folder = local if local.exists() else _download(config)
    check_folder(folder, config, chat_template=chat_template)
    return folder


def _is_complete(directory: Path) -> bool:
    """Whether ``save_model`` went through: the tokenizer is what it writes last."""
    return (directory / "tokenizer_config.json").is_file() and bool(list(directory.glob("*.safetensors")))


def _download(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [
        "*.json",
        "*.safetensors",
        "*.jinja",
        "*.model",
        "*.txt",
        *(["*.py"] if config.trust_remote_code else []),
    ]
    try:
        return Path(snapshot_download(config.name, revision=config.revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model.name is {config.name!r}: no such folder here, and the Hub gave no such model ({reason}); "
            f'name an existing Hugging Face folder, a Hub model, "smollm2" or "embedded"'
        ) from None


def check_folder(folder: Path, config: ModelConfig, *, chat_template: bool = True) -> None:
    """ValueError, in one line, when ``folder`` is not a model that the recipe can work with."""
    where = f"model folder {folder}"
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{where}: no config.json there; expected a Hugging Face folder as save_pretrained writes it")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"{where}: no *.safetensors there, and other weight formats can run code when loaded; write the model "
            f"again with model.save_pretrained(folder), which uses safetensors"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise ValueError(f"{where}: no tokenizer there; add one with tokenizer.save_pretrained(folder)")
    _check_readable(folder, config)
    if chat_template and not load_tokenizer(folder, config).chat_template:
        raise ValueError(
            f"{where}: its tokenizer has no chat template; choose an instruction-tuned model, add chat_template.jinja, "
            f'or set data.template = "plain"'
        )


def _check_readable(folder: Path, config: ModelConfig) -> None:
    """ValueError that names the file which is damaged or unknown to transformers; of the weights only headers are read."""
    from safetensors import safe_open
    from transformers import AutoConfig

    def headers() -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "numpy"):
                pass

    def read(what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # safetensors and tokenizers have errors of their own, of no common kind
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(
                f"model folder {folder}: {what} cannot be read ({type(error).__name__}: {reason}); copy or download it again"
            ) from None

    read("config.json", lambda: AutoConfig.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code))
    read("*.safetensors", headers)
    read("its tokenizer", lambda: load_tokenizer(folder, config))

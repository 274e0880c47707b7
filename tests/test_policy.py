"""Loading a policy: what is missing is named, nothing is made up."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhelpers import paths
from rlhelpers.models import choose_device, load_policy, make_optimizer
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.training.config import make_config


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(paths.TINY, tmp_path / "model")


def test_missing_weights_are_not_replaced_by_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model: got .* lacks the weights .*layers\.0\.mlp\.up_proj"):
        load_policy(str(folder), "cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_file_is_an_error_about_the_model(folder, name):
    (folder / name).write_text("broken", encoding="utf-8")
    with pytest.raises(ValueError, match="model: got"):
        load_policy(str(folder), "cpu")


def test_an_empty_directory(tmp_path):
    with pytest.raises(ValueError, match="model: got"):
        load_policy(str(tmp_path), "cpu")


def test_with_gradient_checkpointing_the_torch_engine_samples_the_same():
    sampling = Sampling(n=4, max_tokens=12, seed=3)
    with_it, without = (
        TorchEngine(*load_policy("tiny", "cpu", wanted)).generate(["Question: what is 2 + 3?"], sampling)
        for wanted in (True, False)
    )
    assert with_it == without


def test_a_model_that_cannot_checkpoint(monkeypatch):
    monkeypatch.setattr("transformers.Olmo2ForCausalLM.supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="gradient_checkpointing: got True; Olmo2ForCausalLM has none"):
        load_policy("tiny", "cpu", gradient_checkpointing=True)


class OnACard(torch.nn.Linear):
    """Says so, and is not."""

    device = torch.device("cuda")


def test_adamw_is_fused_on_cuda_and_does_the_same():
    config = make_config(learning_rate=0.1, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(4, 3, generator=generator), torch.randn(5, 4, 3, generator=generator)

    def weights_after_some_steps(layer, fused):
        layer.weight.data.copy_(start)
        optimizer = make_optimizer(layer, config)
        assert optimizer.defaults["fused"] is fused and optimizer.defaults["betas"] == config.betas
        for gradient in gradients:
            layer.weight.grad = gradient.clone()
            optimizer.step()
        return layer.weight.detach()

    on_cpu = torch.nn.Linear(3, 4, bias=False)
    on_cpu.device = torch.device("cpu")
    plain, fused = weights_after_some_steps(on_cpu, False), weights_after_some_steps(OnACard(3, 4, bias=False), True)
    assert not plain.equal(start)
    torch.testing.assert_close(plain, fused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", "cpu:0"])
def test_a_device_that_there_is_not(device):
    with pytest.raises(ValueError, match=f"device: got '{device}'; accepted are auto, cpu, cuda"):
        choose_device(device)

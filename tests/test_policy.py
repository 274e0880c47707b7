"""Loading a policy: what is missing is named, nothing is made up."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from rlhelpers import paths
from rlhelpers.training.policy import load_policy


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

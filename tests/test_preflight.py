"""What a reader of the results must know of settings that are accepted; refusals are in test_bad_parameters.py."""

import pytest
import torch

from rlhelpers.kernels.estimators import Estimator
from rlhelpers.models import make_optimizer
from rlhelpers.training.config import make_config
from rlhelpers.training.preflight import cautions, unmoved_share


@pytest.mark.field_report("B27")
def test_left_out_tokens_are_said_where_there_are_ratios(tiny_gpt2):
    """There is no top_k."""
    policy = tiny_gpt2(torch.float32)
    capped = Estimator("capped", engine_ratio_cap=2.0)
    assert make_config().top_p == 1 and not list(cautions(make_config(estimator="cispo"), policy))
    assert not list(cautions(make_config(top_p=0.9), policy))  # no ratios
    for settings in ({"top_p": 0.9, "estimator": capped}, {"min_tokens": 2, "estimator": "gspo"}):
        [text] = cautions(make_config(**settings), policy)
        assert text.startswith(next(f"{name}={settings[name]} " for name in settings))
    with pytest.raises(ValueError, match="top_k: there is no such setting"):
        make_config(top_k=20)


class Layer(torch.nn.Linear):
    device = torch.device("cpu")

    def __init__(self, weights, dtype):
        super().__init__(len(weights), 1, bias=False, dtype=dtype)
        self.dtype = dtype
        self.weight.data.copy_(torch.tensor([weights]))


@pytest.mark.field_report("B39")
@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_that_swallow_updates_are_said(dtype, moved):
    """Policy: bfloat16 on CUDA as the course has it, without float32 copies; a run that begins says what share of the
    weights an update of the learning rate's size does not move."""
    config = make_config(learning_rate=1e-5)
    layer = Layer([1.0, 1e-3], dtype)
    before, share = layer.weight.detach().clone(), unmoved_share(layer, config.learning_rate)
    optimizer = make_optimizer(layer, config)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert layer.weight[0, 0].item() == pytest.approx(0.9990 if moved else 1.0, abs=1e-5)
    changed = (layer.weight != before).float().mean().item()
    assert changed == 1 - share == (1.0 if moved else 0.5)
    texts = list(cautions(config, layer))
    assert not texts if moved else texts[0].startswith("50% of the weights are too large for their precision")

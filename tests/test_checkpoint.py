"""Checkpoints: what comes back, that a folder is whole or not there, and which one is used."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch

from rlhelpers.rollouts import Completion, Rollout
from rlhelpers.training.checkpoint import STATE, WEIGHTS, Checkpoint, newest, remove_later

CPU = torch.device("cpu")
CARRIED = {"tally": {"skipped": 0.1 + 0.2}, "remarks": ["’é"]}


def some_updates(policy, optimizer, count):
    for _ in range(count):
        policy.zero_grad()
        loss = policy(torch.randint(0, 16, (2, 8)), labels=torch.randint(0, 16, (2, 8))).loss
        loss.backward()
        optimizer.step()


@pytest.fixture
def moving(tiny_gpt2):
    """A policy and its optimizer after three updates."""
    policy = tiny_gpt2(torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    some_updates(policy, optimizer, 3)
    return policy, optimizer


def take(step, moving, fingerprint="f", ahead=None):
    return Checkpoint.take(step, fingerprint, CARRIED, *moving, ahead)


def weights(policy):
    return [weight.detach().clone() for weight in policy.parameters()]


def test_everything_comes_back_bit_for_bit(tmp_path, moving, tiny_gpt2):
    rollouts = [Rollout("a", [1, 2], [Completion("b", [3], "stop", [-0.1]), Completion("", [], "length", [])])]
    take(7, moving, ahead=rollouts).save(tmp_path)
    expected = [random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    policy = tiny_gpt2(torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1)
    found = newest(tmp_path, "f", pytest.fail)
    assert (found.step, found.carried, found.ahead) == (7, CARRIED, rollouts)
    found.restore(policy, optimizer)
    found.restore_randomness(CPU)
    assert [random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()] == expected
    random.setstate(state[0]), np.random.set_state(state[1])
    for those in (moving, (policy, optimizer)):  # and with moments and settings that are the same, both go the same way
        torch.set_rng_state(state[2])
        some_updates(*those, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(moving[0]), weights(policy), strict=True))


def test_only_the_last_two_are_kept(tmp_path, moving):
    for step in (9_998, 99_999, 100_000, 100_001):
        take(step, moving).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step_100000", "step_100001"}
    assert newest(tmp_path, "f", pytest.fail).step == 100_001
    take(100_001, moving).save(tmp_path)  # once more
    remove_later(tmp_path, 100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step_100000"]


def flip(file, at=0.5):
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["policy.safetensors", "state.pt", "state.json", "SHA256SUMS"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: os.truncate(file, file.stat().st_size // 2),
        flip,
        lambda file: file.write_bytes(os.urandom(file.stat().st_size)),
    ],
    ids=["missing", "empty", "half", "one bit", "noise"],
)
def test_a_damaged_one_is_left_for_the_one_before(tmp_path, moving, name, damage):
    for step in (1, 2):
        take(step, moving).save(tmp_path)
    damage(tmp_path / "step_00002" / name)
    remarks = []
    assert newest(tmp_path, "f", remarks.append).step == 1
    [remark] = remarks
    assert remark.startswith("The checkpoint step_00002 is not used: ")
    shutil.rmtree(tmp_path / "step_00001")
    assert newest(tmp_path, "f", remarks.append) is None


def test_one_of_another_configuration_is_not_used(tmp_path, moving):
    take(1, moving).save(tmp_path)
    remarks = []
    assert newest(tmp_path, "g", remarks.append) is None
    assert remarks == ["The checkpoint step_00001 is not used: it is of another configuration"]
    assert newest(tmp_path / "nothing here", "f", pytest.fail) is None


def test_it_is_read_without_running_code(tmp_path, moving):
    """state.pt is a pickle, of which torch reads tensors and plain values only."""

    class Malice:
        def __reduce__(self):
            return print, ("it ran",)

    checkpoint = take(1, moving)
    checkpoint.optimizer["state"][0]["step"] = Malice()
    checkpoint.save(tmp_path)
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        newest(tmp_path, "f", pytest.fail)


def test_another_kind_of_policy_is_an_error_that_names_both(tmp_path, moving, tiny_gpt2):
    other = tiny_gpt2(torch.float64)
    with pytest.raises(ValueError, match=r"resume: in the checkpoint .*float32.*float64.*; a run goes on with"):
        take(1, moving).restore(other, torch.optim.AdamW(other.parameters()))


def test_the_sums_are_those_of_sha256sum(tmp_path, moving):
    take(1, moving).save(tmp_path)
    folder = tmp_path / "step_00001"
    assert [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()] == [
        "policy.safetensors",
        "state.pt",
        "state.json",
    ]
    assert json.loads((folder / "state.json").read_text(encoding="utf-8"))["carried"] == CARRIED


@pytest.mark.field_report("B45")
@pytest.mark.parametrize("damage", ["half the weights", "no optimizer", "no name"])
def test_one_that_is_not_whole_is_not_used(damage, tmp_path, moving):
    for step in (9, 10, 20):
        take(step, moving).save(tmp_path)
    take(9, moving).save(tmp_path / "nine")
    (tmp_path / "nine" / "step_00009").rename(tmp_path / "step_9")  # "step_9" > "step_00010" as text
    last, said = tmp_path / "step_00020", []
    if damage == "half the weights":
        os.truncate(last / WEIGHTS, (last / WEIGHTS).stat().st_size // 2)
    elif damage == "no optimizer":
        (last / STATE).unlink()
    else:
        last.rename(tmp_path / "step_00020.123.tmp")
    assert newest(tmp_path, "f", said.append).step == 10
    assert len(said) == (damage != "no name") and all("step_00020 is not used" in text for text in said)


@pytest.mark.field_report("B45")
def test_it_has_its_name_when_it_is_whole(tmp_path, moving, monkeypatch):
    names = []

    def save(state, file):
        names.append(file.parent.name)
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="disk full"):
        take(10, moving).save(tmp_path)
    assert len(names) == 1 and names[0].endswith(".tmp") and not list(tmp_path.iterdir())

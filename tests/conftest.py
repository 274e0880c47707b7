"""Shared by the tests: a word-level tokenizer, tiny GPT-2s with random weights, the losses in plain loops, folders of
finished runs, and notebooks executed by papermill."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rlhelpers import paths  # before torch, whose threads it makes wait briefly

# isort: split

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rlhelpers.kernels import fused_logprobs as vocabulary
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.training.config import make_config

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"abcdefghijklm"]


@pytest.fixture(scope="module")
def one_thread():
    """One torch thread: a model this small has no work for two, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of logits that are no more beside a small model than they are beside a real one, and as long on the CPU as
    on a GPU."""
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", dict.fromkeys(vocabulary.CHUNK_BYTES, 2**20))


@pytest.fixture(scope="session")
def largest_difference():
    """The largest |log-prob of the engine - log-prob of the policy| over some rollouts, in nats."""

    def largest(policy, rollouts, temperature: float = 1.0) -> float:
        completions = [(r.prompt_token_ids, c) for r in rollouts for c in r.completions]
        rows = [(prompt_ids, c.token_ids) for prompt_ids, c in completions]
        batch = pad_prompts_and_outputs(*zip(*rows, strict=True), pad_id=0)
        scores = score_batch(policy, batch["input_ids"], batch["labels"], 32, temperature).cpu()
        sampled = torch.tensor([log_prob for _, c in completions for log_prob in c.log_probs])
        return (scores[batch["response_mask"].bool()] - sampled).abs().max().item()

    return largest


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def tiny_gpt2():
    """Builds a GPT-2 of about 1 200 weights: always the same ones, in eval mode."""

    def build(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> GPT2LMHeadModel:
        config = GPT2Config(
            vocab_size=len(VOCABULARY),
            n_positions=32,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            # Large weights: the library's own 0.02 makes every next-token distribution almost uniform.
            initializer_range=0.5,
            bos_token_id=1,
            eos_token_id=1,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return GPT2LMHeadModel(config).to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def naive_token_losses():
    """The per-token losses of one response, its tokens one after the other, as the handout writes them."""

    def losses(method: str, advantage: float, new: list, old: list, eps: float | tuple | None) -> list:
        low, high = eps if isinstance(eps, tuple) else (eps, eps)
        if method == "none":
            return [-advantage * n for n in new]
        log_ratios = [n - o for n, o in zip(new, old, strict=True)]
        if method == "gspo":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        ratios = [log_ratio.exp() for log_ratio in log_ratios]
        if method == "noclip":
            return [-advantage * r for r in ratios]
        if method == "cispo":
            return [-advantage * min(r.item(), 1 + high) * n for r, n in zip(ratios, new, strict=True)]
        return [-min(advantage * r, advantage * min(max(r, 1 - low), 1 + high)) for r in ratios]

    return losses


@pytest.fixture
def no_quick(monkeypatch):
    """Runs as long as they say, also where CI asks for short ones."""
    monkeypatch.delenv("RLHELPERS_QUICK", raising=False)


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """The folders of the reader's runs and of the committed ones, both empty."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return tmp_path / "runs", tmp_path / "results"


@pytest.fixture(scope="session")
def write_run():
    """Writes a finished run with these validation rewards, one every five steps, half a minute each."""

    def write(root, seed=0, status="complete", rewards=(0.1, 0.5), without=(), **settings):
        config = make_config(seed=seed, **settings)
        folder = root / config.experiment / config.variant / f"seed={seed}"
        folder.mkdir(parents=True)
        kept = {name: value for name, value in config.model_dump(mode="json").items() if name not in without}
        (folder / "config.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
        rows = [{"step": 5 * i, "val_reward": reward, "seconds": 30.0} for i, reward in enumerate(rewards)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps({"status": status}), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook by papermill in tmp_path, with runs and figures under it; returns the finished process and the
    path of the executed notebook."""
    for name in ("tiny", "results", "gsm8k"):
        if (paths.DATA / name).exists():
            (tmp_path / "data").mkdir(exist_ok=True)
            (tmp_path / "data" / name).symlink_to(paths.DATA / name)

    def run(notebook: str | Path, *arguments: str):
        output = tmp_path / "executed.ipynb"
        result = subprocess.run(
            [Path(sys.executable).with_name("papermill"), paths.ROOT / "notebooks" / notebook, output, *arguments],
            cwd=tmp_path,
            env=os.environ | {"RLHELPERS_ROOT": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return result, output

    return run

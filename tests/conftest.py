"""Shared by the tests: a word-level tokenizer, tiny GPT-2s with random weights, and the losses in plain loops."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"abcdefghijklm"]


@pytest.fixture(scope="module")
def one_thread():
    """One torch thread: a model this small has no work for two, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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

    def losses(method: str, advantage: float, new: list, old: list, eps: float | None) -> list:
        if method == "none":
            return [-advantage * n for n in new]
        log_ratios = [n - o for n, o in zip(new, old, strict=True)]
        if method == "gspo":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        ratios = [log_ratio.exp() for log_ratio in log_ratios]
        if method == "noclip":
            return [-advantage * r for r in ratios]
        if method == "cispo":
            return [-advantage * min(r.item(), 1 + eps) * n for r, n in zip(ratios, new, strict=True)]
        return [-min(advantage * r, advantage * min(max(r, 1 - eps), 1 + eps)) for r in ratios]

    return losses

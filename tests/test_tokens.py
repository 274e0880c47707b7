"""Ids, labels and mask: what was sampled is what is scored, and nothing else is marked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs, padding_id, tokenize_prompt_and_output

IDS = st.lists(st.integers(1, 15), min_size=1, max_size=6)
# An output may be empty: a model may stop at once.
PAIRS = st.lists(st.tuples(IDS, st.lists(st.integers(1, 15), max_size=6)), min_size=1, max_size=5)


def test_small_batch_by_hand(tokenizer):
    batch = tokenize_prompt_and_output(["a b", "c"], ["d", "e f g"], tokenizer)
    # a b d 0 | c e f g, with a = 3
    assert batch["input_ids"].tolist() == [[3, 4, 6], [5, 7, 8]]
    assert batch["labels"].tolist() == [[4, 6, 0], [7, 8, 9]]
    assert batch["response_mask"].tolist() == [[False, True, False], [True, True, True]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool


@given(PAIRS)
@settings(deadline=None, max_examples=50)
def test_against_loops(pairs):
    prompts, outputs = zip(*pairs, strict=True)
    batch = pad_prompts_and_outputs(prompts, outputs, pad_id=0)
    width = max(len(p) + len(o) for p, o in pairs)
    assert all(tensor.shape == (len(pairs), width - 1) for tensor in batch.values())
    for i, (prompt, output) in enumerate(pairs):
        padded = prompt + output + [0] * (width - len(prompt) - len(output))
        assert batch["input_ids"][i].tolist() == padded[:-1]
        assert batch["labels"][i].tolist() == padded[1:]
        # The mask, laid on the labels, reads the output and nothing else.
        assert batch["labels"][i][batch["response_mask"][i]].tolist() == output


def test_from_ids_equals_from_text(tokenizer):
    prompts, outputs = ["a b c", "d"], ["e", "f g <eos>"]
    from_text = tokenize_prompt_and_output(prompts, outputs, tokenizer)
    from_ids = pad_prompts_and_outputs(
        [encode(tokenizer, p) for p in prompts], [encode(tokenizer, o) for o in outputs], padding_id(tokenizer)
    )
    assert all(torch.equal(from_text[name], from_ids[name]) for name in from_text)


def test_prompt_and_output_are_not_merged_across_the_border():
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "<pad>": 3}, [("a", "b")])), pad_token="<pad>"
    )
    assert encode(merging, "ab") == [2]  # together they would be one token
    batch = tokenize_prompt_and_output(["a"], ["b"], merging)
    assert batch["input_ids"].tolist() == [[0]]
    assert batch["labels"].tolist() == [[1]]
    assert batch["response_mask"].tolist() == [[True]]


def test_a_tokenizer_that_adds_bos_adds_none(tokenizer):
    words = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    words.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    adding = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<eos>", pad_token="<pad>")
    assert adding("a")["input_ids"] == [1, 3]  # it does add one when nobody objects
    batch = tokenize_prompt_and_output(["a b"], ["c d"], adding)
    assert batch["input_ids"].tolist() == [[3, 4, 5]]
    assert batch["labels"].tolist() == [[4, 5, 6]]


def test_a_real_eos_counts_where_pad_is_eos(tokenizer):
    same = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<eos>", eos_token="<eos>", unk_token="<unk>"
    )
    batch = tokenize_prompt_and_output(["a", "a"], ["b <eos>", "b c d e"], same)
    assert batch["labels"][0].tolist() == [4, 1, 1, 1]  # b, its own EOS, and two of padding
    assert batch["response_mask"][0].tolist() == [True, True, False, False]


def test_an_empty_output_marks_nothing(tokenizer):
    batch = tokenize_prompt_and_output(["a b", "a b"], ["", "c d"], tokenizer)
    assert batch["response_mask"].tolist() == [[False, False, False], [False, True, True]]


def test_padding_id_is_pad_else_eos_else_0(tokenizer):
    words = tokenizer.backend_tokenizer
    assert padding_id(PreTrainedTokenizerFast(tokenizer_object=words, pad_token="c", eos_token="<eos>")) == 5
    assert padding_id(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")) == 1
    assert padding_id(PreTrainedTokenizerFast(tokenizer_object=words)) == 0


@pytest.mark.parametrize(("prompts", "outputs"), [(["a"], ["b", "c"]), ([], []), (["a"], [])])
def test_lists_of_different_length_or_empty(prompts, outputs, tokenizer):
    found = f"prompt_strs has {len(prompts)}, output_strs has {len(outputs)}"
    with pytest.raises(ValueError, match=found):
        tokenize_prompt_and_output(prompts, outputs, tokenizer)
    with pytest.raises(ValueError, match=f"prompt_ids has {len(prompts)}, output_ids has {len(outputs)}"):
        pad_prompts_and_outputs([[3]] * len(prompts), [[4]] * len(outputs), 0)

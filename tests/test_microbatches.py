"""How a batch is cut into microbatches."""

import pytest
import torch

from rlhelpers.kernels.microbatches import TrainBatch, pack_rows, row_lengths

LENGTHS = [3, 1, 6, 2, 4, 4, 1, 5, 2, 7, 3, 1]


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 5, 12, 100])
def test_packed_rows_are_all_there_once_and_within_the_budget(microbatch_size):
    prompts = [4, 9, 2]  # of the three groups of four
    lengths = [prompts[i // 4] + n for i, n in enumerate(LENGTHS)]
    rows = [i for i in range(12) if i not in (5, 9)]
    packs = [pack.tolist() for pack in pack_rows(rows, lengths, 4, microbatch_size)]
    assert sorted(row for pack in packs for row in pack) == rows
    assert all(len(pack) * max(lengths[row] for row in pack) <= microbatch_size * max(lengths) for pack in packs)
    if microbatch_size >= 4:  # then every group fits, and is in one piece
        assert sum(len({row // 4 for row in pack}) for pack in packs) == 3
    groups = [row // 4 for pack in packs for row in pack]
    assert groups == sorted(groups, key=lambda g: max(lengths[row] for row in rows if row // 4 == g))
    assert pack_rows([], lengths, 4, microbatch_size) == []


def test_lengths_are_without_padding():
    mask = torch.tensor([[False, True, True, False], [True, False, False, True], [False] * 4])
    assert row_lengths(mask) == [3, 4, 1]


def test_selected_rows_have_no_column_of_padding_alone():
    mask = torch.tensor([[False, True, False, False], [True, True, True, False]])
    ids = torch.arange(8).view(2, 4)
    batch = TrainBatch(ids, ids, mask, torch.tensor([1.0, 2.0]), 2, old_log_probs=-ids.float())
    part = batch.rows(torch.tensor([0]), torch.device("cpu"))
    assert part.labels.tolist() == [[0, 1]] and part.rewards.tolist() == [1.0]
    assert part.old_log_probs.tolist() == [[0.0, -1.0]] and part.ref_log_probs is None
    assert batch.rows(torch.tensor([1]), torch.device("cpu")).labels.tolist() == [[4, 5, 6]]

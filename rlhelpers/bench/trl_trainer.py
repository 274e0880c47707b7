"""One step of TRL's GRPOTrainer, on given responses or its own."""

import os
import tempfile
from contextlib import AbstractContextManager

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from rlhelpers.bench.case import Batch, Case
from rlhelpers.bench.textbook import cut

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, which it says every time
from trl import GRPOConfig, GRPOTrainer


class _Rewards:
    """The reward function; afterwards `batch` is what was graded."""

    __name__ = "reward"  # TRL names its metrics after it

    def __init__(self, case: Case):
        self.case = case

    def __call__(self, prompts, completions, completion_ids, ground_truth, **_) -> list[float]:
        responses = [cut(text, self.case.grader.prompt.stop) for text in completions]
        read = self.case.tokenizer(prompts)["input_ids"]
        self.batch = Batch(prompts, responses, ground_truth, list(zip(read, completion_ids, strict=True)))
        return self.case.rewards(self.batch)


class _Meter(TrainerCallback):
    def __init__(self, meter: AbstractContextManager):
        self.meter = meter

    def on_step_begin(self, *_, **__) -> None:
        self.meter.__enter__()

    def on_step_end(self, *_, **__) -> None:
        self.meter.__exit__(None, None, None)


def take_step(
    case: Case, model: PreTrainedModel, number: int, meter: AbstractContextManager, given: Batch | None
) -> Batch:
    """Take step `number` on its own samples, or update the model once from the batch that is given; return what was
    trained on.  `meter` is entered around the step alone.

    TRL gives `model.generate` no tokenizer, so that it knows no stop string and samples to the end-of-text token.
    """

    def responses(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        if prompts != given.prompts:
            raise ValueError("prompts: TRL asks for other prompts, or in another order, than the batch has")
        prompt_ids, completion_ids = (list(ids) for ids in zip(*given.token_ids, strict=True))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    group, rewards = case.config.group_size, _Rewards(case)
    if given is None:
        problems = zip(case.prompts(number), [problem.answer for problem in case.problems(number)], strict=True)
    else:
        problems = zip(given.prompts[::group], given.ground_truths[::group], strict=True)
    data = Dataset.from_list([{"prompt": prompt, "ground_truth": truth} for prompt, truth in problems])
    seed = case.sampling(number).seed % 2**32
    with tempfile.TemporaryDirectory(prefix="rlhelpers-bench-") as folder, torch.random.fork_rng(devices=[]):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=_arguments(case, folder, seed),
            train_dataset=data,
            processing_class=case.tokenizer,
            callbacks=[_Meter(meter)],
            optimizers=(case.optimizer(model), None),
            rollout_func=None if given is None else responses,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return rewards.batch if given is None else given


def _arguments(case: Case, folder: str, seed: int) -> GRPOConfig:
    """Return our step's formula, on the CPU in float32; where settings differ in speed alone, the faster one."""
    config = case.config
    return GRPOConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=config.microbatch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_generations=config.group_size,
        max_completion_length=config.max_tokens,
        temperature=config.temperature,
        loss_type="dr_grpo",  # divides by rows x max_completion_length, as our constant does
        scale_rewards="none",
        beta=0.0,
        num_iterations=1,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm,
        shuffle_dataset=False,
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

"""The reports on the training step as text for a person: beside others, how it grows, what its parts are worth."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rlhelpers.bench.rounds import Spread
from rlhelpers.bench.tables import conditions_text, table


def step_text(report: Mapping[str, Any]) -> str:
    """What `bench_step` reports."""
    rows = [
        _contestant_row(name, row) | {"tokens read": f"{row['tokens_read']:,}"}
        for name, row in report["contestants"].items()
    ]
    notes = [
        f"One AdamW step of Dr. GRPO on the same {report['responses']} responses in groups of {report['group_size']}, "
        f"{report['response_tokens']:,} tokens in all; {report['without_advantage']} responses have no advantage.",
        "tokens read: those that go through the model forward, prompts and padding included.",
    ]
    return _contestants_text(rows, notes, report)


def whole_step_text(report: Mapping[str, Any]) -> str:
    """What `bench_whole_step` reports."""
    rows = [
        _contestant_row(name, row)
        | {"tokens per response": f"{row['response_length']:.1f}", "bias": f"{row['bias']:+.1f}"}
        for name, row in report["contestants"].items()
    ]
    notes = [
        f"Sample, grade, train: {report['responses']} responses in groups of {report['group_size']}, Dr. GRPO; each "
        "trains on its own samples.  rlhelpers: all that a run does in a step but validation.",
        "bias: in standard errors, of the mean log-prob of the samples from minus the policy's entropy.",
    ]
    return _contestants_text(rows, notes, report)


def logprobs_text(report: Mapping[str, Any]) -> str:
    """What `bench_logprobs` reports."""
    works = report["works"]
    rows = [
        {
            "dtype": work["dtype"],
            "log-probs": name,
            "seconds": Spread(**row["seconds"]).show(1),
            "ratio": Spread(**row["ratio"]).show(2),
            "extra MiB": f"{row['extra_bytes']['median'] / 2**20:,.0f}",
            "times less": f"{row['memory_ratio']:.1f}",
            "beyond gradients": f"{row['beyond_ratio']:.1f}",
        }
        for work in works
        for name, row in work["contestants"].items()
    ]
    notes = ["", *(_describe_logprobs(work) for work in works)]
    notes += [
        "Forward and backward, each time in a process of its own.  Median (lowest to highest) of rounds in turns: "
        f"{next(iter(works[0]['contestants'].values()))['rounds']}; ratio of the seconds, round by round.",
        "extra MiB: peak RAM beyond hidden states, weight and labels; the gradients, which both hand back, are in it.  "
        "beyond gradients: how many times less without them.",
        conditions_text(report["conditions"]),
    ]
    return "\n".join([table(pd.DataFrame(rows)), *notes])


def growth_text(report: Mapping[str, Any]) -> str:
    """What `bench_growth` reports."""
    rows = [
        _growth_row(name, f"{what}, s", sweep["values"], [s["median"] for s in sweep[what]["seconds"]], sweep[what])
        for name, sweep in report["times"].items()
        for what in ("training", "sampling")
    ]
    memory, size = report["memory"], report["size"]
    extra = [count / 2**20 for count in memory["extra_bytes"]]
    rows.append(_growth_row("responses", "training, MiB", memory["values"], extra, memory))
    notes = [
        "",
        f"What does not grow: {size['responses']} responses of {size['tokens']} tokens in groups of "
        f"{size['group_size']}; prompts have about {report['prompt_tokens']} tokens, and {report['microbatch_size']} "
        "rows are trained on at a time.",
        f"Seconds are medians of {report['rounds']} rounds in turns after a warm-up.  MiB: peak RAM above what the "
        "process held before, each in a process of its own.",
        "exponent: k of c x^k, fitted to all sizes in logarithms, with the 95% interval that their scatter about the "
        "straight line gives.",
        conditions_text(report["conditions"]),
    ]
    return "\n".join([table(pd.DataFrame(rows)), *notes])


def gpu_text(report: Mapping[str, Any]) -> str:
    """What `bench_gpu` reports."""
    rows = [_variant_row(name, row, report["state_bytes"]) for name, row in report["variants"].items()]
    scale, found = report["scale"], report["conditions"]
    notes = [
        "",
        *(f"{name}: not measured, {reason}" for name, reason in report["failed"].items()),
        f"{found['device']}: {report['matrix_rate'] / 1e12:,.2f} TFLOP/s in the product of two {scale['matrix']} x "
        f"{scale['matrix']} matrices in {report['dtype']}, which is what utilisation is measured by.",
        f"One step of Dr. GRPO and AdamW, {report['parameters'] / 1e6:,.1f} M random weights in {report['dtype']}, "
        f"{scale['groups']} groups of {scale['group_size']} responses, {report['tokens']:,} tokens in all; groups "
        f"without a signal: {scale['without_signal']}; {report['microbatch_size']} rows at a time.",
        "A variant with a + has what those above it have, but for checkpointing.  read: tokens that went through the "
        "model, padding included.",
        f"Median (lowest to highest) of {report['rounds']} rounds in turns after a warm-up, torch.compile after the "
        "others; the ratio to the first is taken round by round.",
        "GiB: the fullest moment, with weights and optimizer, measured and as rlhelpers doctor counts it, without what "
        "CUDA itself takes.",
        "gradient: |g - g'| / |g'| of its gradient from the first one's; loss: nats per token that lie between them.",
        conditions_text(found),
    ]
    return "\n".join([table(pd.DataFrame(rows)), *notes])


def _contestants_text(rows: list[dict[str, str]], notes: list[str], report: Mapping[str, Any]) -> str:
    first, row = next(iter(report["contestants"].items()))
    notes = [
        "",
        *notes,
        f"Median (lowest to highest) of {row['rounds']} rounds in turns after a warm-up; the ratio to the seconds of "
        f"{first} is taken round by round.",
        "difference: of the update of the weights from the textbook's, |a - b| / |b|.  extra MiB: peak RAM above what "
        "the process held before, each in a process of its own.",
    ]
    return "\n".join([table(pd.DataFrame(rows)), *notes, conditions_text(report["conditions"])])


def _contestant_row(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "step": name,
        "seconds": Spread(**row["seconds"]).show(2),
        "ratio": Spread(**row["ratio"]).show(2),
        "extra MiB": f"{row['extra_bytes'] / 2**20:,.0f}",
        "difference": f"{row['difference']:.1e}",
    }


def _describe_logprobs(work: Mapping[str, Any]) -> str:
    found = ", ".join(f"{name} {difference:.1e}" for name, difference in work["differences"].items())
    return (
        f"{work['dtype']}: {work['tokens']:,} tokens, hidden {work['hidden']:,}, vocabulary {work['vocabulary']:,}; "
        f"gradients of {work['gradient_bytes'] / 2**20:,.0f} MiB.  Largest differences, of the largest number: {found}."
    )


def _growth_row(
    grows: str, what: str, values: Sequence[int], measured: Sequence[float], curve: Mapping[str, Any]
) -> dict[str, str]:
    fit = curve["exponent"]
    return {
        "grows": grows,
        "from": str(values[0]),
        "to": str(values[-1]),
        "measured": what,
        "at first": f"{measured[0]:.3g}",
        "at last": f"{measured[-1]:.3g}",
        "exponent": f"{fit['exponent']:.2f} ({fit['low']:.2f} to {fit['high']:.2f})",
    }


def _variant_row(name: str, row: Mapping[str, Any], state_bytes: int) -> dict[str, str]:
    return {
        "variant": name,
        "seconds": Spread(**row["seconds"]).show(3),
        "ratio": Spread(**row["ratio"]).show(2),
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "read": f"{row['tokens_read']:,}",
        "utilisation": f"{row['utilisation']:.1%}",
        "GiB": f"{(state_bytes + row['peak_bytes']) / 2**30:.3g}",
        "predicted": f"{(state_bytes + row['predicted_bytes']) / 2**30:.3g}",
        "gradient": f"{row['difference']:.1e}",
        "loss": f"{row['loss_difference']:.1e}",
    }

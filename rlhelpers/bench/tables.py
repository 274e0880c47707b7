"""The reports as text for a person; the numbers that others take are in the files."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlhelpers.bench.rounds import Spread


def engines_text(report: Mapping[str, Any]) -> str:
    """What `bench_engines` reports: one table of the engines, and one of their work."""
    lives = pd.DataFrame([_life_row(name, row) for name, row in report["engines"].items()])
    notes = [
        "",
        *_notes_on_work(report),
        "cores: how many were busy on average, with the trainer's process and the engines that wait.",
        "threads: those that compute; vLLM's other processes (server, scheduler) come on top.",
        "start-up: that of the first vLLM engine has the import of vllm by the trainer in it, which the other finds "
        "done.",
        conditions_text(report["conditions"]),
    ]
    return "\n".join([_work_table(report), "", table(lives), *notes])


def rollouts_text(report: Mapping[str, Any]) -> str:
    """What `bench_rollouts` reports."""
    found = ", ".join(f"{errors:+.1f} ({name})" for name, errors in report["likelihood"].items())
    notes = [
        "",
        *_notes_on_work(report),
        f"The mean log-prob of a response differs between the two by {found} standard errors, taken within prompts.",
        conditions_text(report["conditions"]),
    ]
    return "\n".join([_work_table(report), *notes])


def long_text(report: Mapping[str, Any]) -> str:
    """What `bench_long` reports."""
    rows = [
        {
            "after step": f"{reading['step']:,}",
            "memory, MiB": f"{reading['rss_mib']:,.1f}",
            "open files": reading["open_files"],
            "threads": reading["threads"],
        }
        for reading in report["readings"]
    ]
    once = "each step once" if report["each_step_once"] else "not each step once"
    notes = ["", f"{report['lines']:,} steps in the log, {once}; {report['seconds']:.0f} seconds."]
    return "\n".join([table(pd.DataFrame(rows)), *notes, conditions_text(report["conditions"])])


def imports_text(report: Mapping[str, Any]) -> str:
    """What `bench_imports` reports."""
    rows = [
        {
            "start": name,
            "CPU seconds": Spread(**row["seconds"]).show(2),
            "torch": "yes" if row["has_torch"] else "no",
            "beyond": f"{row['beyond']:+.2f}",
        }
        for name, row in report["starts"].items()
    ]
    notes = [
        "",
        f"Of a whole process: median (lowest to highest) of {report['rounds']} rounds in turns after a warm-up.",
        "beyond: the median above that of python, or of torch where torch is imported.",
        conditions_text(report["conditions"]),
    ]
    return "\n".join([table(pd.DataFrame(rows)), *notes])


def ahead_text(report: Mapping[str, Any]) -> str:
    """What `bench_ahead` reports."""
    runs = pd.DataFrame([_ahead_row(name, row) for name, row in report["runs"].items()])
    threads, found = report["threads"], report["conditions"]
    notes = [
        "",
        f"{report['estimator']}, {report['updates_per_step']} updates for each batch, {report['steps']} steps; "
        f"runs of each kind, in turns: {len(next(iter(report['runs'].values()))['run_seconds'])}.",
        "s per step: without validation, over the steps from the second to the last but one.  s in all: all steps of a "
        "run, the first and last too.",
        "sampling: what the trainer waits for rollouts.  mismatch: in nats, from the policy that is trained; one step "
        "ahead, the samples are those of the policy before its last updates.",
        f"Ahead, the server samples the next batch (threads that compute: {threads['server']}, besides its own "
        f"processes) while the trainer trains (threads: {threads['trainer']}), on {found['cores']} cores together.",
        "This is the time of a step, not what a step teaches: that takes runs with several seeds.",
        conditions_text(found),
    ]
    return "\n".join([table(runs), *notes])


def grader_text(report: Mapping[str, Any]) -> str:
    """What `bench_grader` reports: one table of the times, and one of the agreement."""
    groups = report["groups"].items()
    speeds = [_grader_row(name, n, row, group) for name, group in groups for n, row in group["graders"].items()]
    verdicts = [_agreement_row(name, found) for name, found in report["agreement"].items()]
    middle = report["groups"][report["median_group"]]["graders"]
    medians = [f"{name} {row['ms_per_1000']['median']:,.0f}" for name, row in middle.items()]
    notes = [
        "",
        f"{report['responses']:,} responses ({report['source']}).  In the median group, {report['median_group']}, ms "
        f"per 1,000 responses: {', '.join(medians)}.",
        f"Median (lowest to highest) of {report['rounds']} rounds in turns, in one thread, after a warm-up; the ratio "
        "to rlhelpers is taken round by round, and above 1 is slower.",
        "math-verify: parse and verify on what the prompt's box holds, and only where the format is kept.",
        "agrees: responses with the same format reward and the same answer reward as by rlhelpers.",
        *(
            f"Where {name} differs, rlhelpers says: {_count(row['reasons'])}"
            for name, row in report["agreement"].items()
        ),
        conditions_text(report["conditions"]),
    ]
    return "\n".join([table(pd.DataFrame(speeds)), "", table(pd.DataFrame(verdicts)), *notes])


def conditions_text(found: Mapping[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    variables = ", ".join(f"{name}={value}" for name, value in found["environment"].items() if value is not None)
    return (
        f"{found['cpu']}, {found['cores']} cores, load {found['load']} before; {installed}, Python {found['python']}; "
        f"torch threads: {found['torch_threads']}; {variables or 'no variable sets threads'}; {found['date']}"
    )


def _work_table(report: Mapping[str, Any]) -> str:
    loads = report["workloads"].items()
    return table(pd.DataFrame([_work_row(name, n, row) for name, load in loads for n, row in load["engines"].items()]))


def _notes_on_work(report: Mapping[str, Any]) -> list[str]:
    loads, base = report["workloads"], next(iter(report["engines"]))
    rounds = len(next(iter(next(iter(loads.values()))["engines"].values()))["tokens"])
    return [
        *(f"{name}: {_describe_work(load)}" for name, load in loads.items()),
        f"Median (lowest to highest) of {rounds} rounds in turns after a warm-up; the ratio to {base} is taken round "
        "by round.",
        "mismatch: |log-prob of the engine - of the policy| in nats; bias: in standard errors, of the mean log-prob "
        "of the samples from minus the policy's entropy.",
    ]


def _work_row(workload: str, engine: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "workload": workload,
        "engine": engine,
        "tokens/s": Spread(**row["tokens_per_second"]).show(0),
        "ratio": Spread(**row["ratio"]).show(2),
        "cores": f"{row['cores']['median']:.2f}",
        "mismatch mean": "" if row["mismatch_mean"] is None else f"{row['mismatch_mean']:.1e}",
        "max": "" if row["mismatch_max"] is None else f"{row['mismatch_max']:.1e}",
        "bias": "" if row["bias"] is None else f"{row['bias']:+.1f}",
    }


def _life_row(engine: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "engine": engine,
        "threads": "?" if row["threads"] is None else str(row["threads"]),
        "start-up and first sync, s": f"{row['startup_seconds']:.1f}",
        "sync, s": Spread(**row["sync_seconds"]).show(3),
    }


def _ahead_row(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "rollouts": name,
        "s per step": Spread(**row["seconds_per_step"]).show(2),
        "sampling, s": f"{row['seconds_sampling']['median']:.2f}",
        "s in all": Spread(**row["all_steps"]).show(1),
        "ratio": Spread(**row["ratio"]).show(2),
        "tokens per response": f"{row['response_length']:.1f}",
        "mismatch mean": f"{row['mismatch_mean']:.1e}",
    }


def _grader_row(group: str, grader: str, row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    return {
        "run, prompt": group,
        "responses": f"{found['responses']:,}",
        "grader": grader,
        "ms per 1,000": Spread(**row["ms_per_1000"]).show(0),
        "ratio": Spread(**row["ratio"]).show(1),
        "agrees": f"{found['agreement'][grader]['share']:.2%}" if grader in found["agreement"] else "",
    }


def _agreement_row(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "verdict": name,
        "responses": f"{row['responses']:,}",
        "agrees": f"{row['share']:.2%}",
        "differences": f"{row['differences']:,}",
        "in format": f"{row['format_differences']:,}",
        "in answer": f"{row['answer_differences']:,}",
    }


def _count(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in reasons.items()) or "nowhere"


def _describe_work(load: Mapping[str, Any]) -> str:
    ends = f"to {load['stop']!r} or " if load["stop"] else ""
    length = f"{load['max_tokens']} tokens" if load["min_tokens"] else f"{ends}at most {load['max_tokens']} tokens"
    return f"{load['prompts']} prompts x {load['n']}, {length}"


def table(rows: pd.DataFrame) -> str:
    return rows.to_string(index=False)

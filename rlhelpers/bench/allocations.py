"""How many bytes torch's tensors take at their fullest moment, by torch's own count."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Call the function; what its tensors took on the device at a time, beyond those that were there before.

    On CUDA the allocator counts.  On the CPU torch's profiler sees every block come and go, which takes its time; what
    a library takes without torch's allocator is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak

"""Rivals measured on 4 H200s in another run, and shown as such: not every machine can install them."""

QUOTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "gpt-13b 8x512 4 ranks": {
        "megatron-fsdp 0.6.1": (734, 434, 105),
        "deepspeed 0.19.8 recompute=full": (940, 339, 62),
        "bmtrain 1.0.1 recompute=full": (966, 329, 57),
    },
}
"""By job and engine: milliseconds of a step, model TFLOP/s a GPU, peak GB."""


def quoted_reports(job: str, measured: list[str]) -> list[dict]:
    """Reports of `job` in the benchmark's form, as far as these numbers go; not of engines that were `measured`."""
    there = {name.split()[0] for name in measured}
    return [
        {"engine": engine, "job": job, "ms": ms, "TFLOPs": tflops, "peak_GB": peak, "other run": True}
        for engine, (ms, tflops, peak) in QUOTED.get(job, {}).items()
        if engine.split()[0] not in there
    ]

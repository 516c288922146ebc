"""The costs that `mqd size` uses, from measurements: mqd/cli/sizing.json. Pure except for the files
that it reads and writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from mqd.cli.sizing import SHIPPED_FIGURES, Figures, figures_from
from perf import scaling, usl
from perf.report import rounded

APPEND = {1024: "1 KiB batch appended, io_uring", 16384: "16 KiB batch appended, io_uring"}
APPEND_SMALL = 200, "200-byte batch appended, io_uring"  # as batches per CPU-second
FORWARD = {1024: "CPU added by forwarding, 1 KiB batch", 16384: "CPU added by forwarding, 16 KiB batch"}
PESSIMISTIC_AT_WORKERS = 16
FETCH = {65536: "fetch of 64 KiB, io_uring", 1 << 20: "fetch of 1 MiB, io_uring"}


def figures(run: dict, scaled: dict) -> Figures:
    """`run`: a line of perf/history.jsonl; `scaled`: perf/scaling.json. Raises KeyError if a figure is
    missing. Noise cannot make larger batches cheaper, or a difference negative. From the confidence
    range of the scalability law the pessimistic end at PESSIMISTIC_AT_WORKERS workers is used, so that
    the machine is too large rather than too small.
    """

    def median_of(name: str) -> float:
        return run["figures"][name]["median"]

    def growing(costs: dict[int, float]) -> dict[int, float]:
        found, least = {}, 0.0
        for size in sorted(costs):
            found[size] = least = max(least, costs[size])
        return found

    machine, law = run["machine"], usl.fit(scaling.by_workers(scaled))
    contention, coherency = law.pessimistic(PESSIMISTIC_AT_WORKERS)
    broker, worker = scaling.memory_of(scaled)
    size, small = APPEND_SMALL
    return Figures(
        source=(
            f"make bench, commit {run['commit'][:10]}, one worker core of {machine['cpu']}, Linux {machine['kernel']},"
            f" io_uring; scaling: {scaled['cores']} cores, {scaled['date'][:10]}"
        ),
        date=run["date"][:10],
        append_cpu_us=growing(
            {size: rounded(1e6 / median_of(small)), **{at: median_of(name) for at, name in APPEND.items()}}
        ),
        forward_cpu_us=growing({at: median_of(name) for at, name in FORWARD.items()}),
        fetch_cpu_us=growing({at: median_of(name) for at, name in FETCH.items()}),
        broker_memory_bytes=broker,
        worker_memory_bytes=worker,
        contention=rounded(contention),
        coherency=rounded(coherency),
        workers_measured=max(count for count in scaling.by_workers(scaled) if count <= scaled["cores"]),
    )


def to_text(found: Figures) -> str:
    """The file's text: one field on a line."""
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    return (
        "{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        + "\n}\n"
    )


def write(run: dict, scaled: Path, target: Path = SHIPPED_FIGURES) -> None:
    """Raises ValueError if nothing has been measured yet."""
    if not scaled.exists():
        raise ValueError(f"{scaled} does not exist: run `python -m perf scaling` first")
    text = to_text(figures(run, json.loads(scaled.read_text())))
    figures_from(text.encode())
    target.write_text(text)

"""`make demo-queue`: starts a broker and workers, sends a thousand jobs, some of them slow, flaky,
failing, urgent or delayed, and kills workers. Then it prints a table of the results and draws which
worker did which job.

    python demo.py [--jobs 1000] [--workers 4] [--kills 12] [--seed 1] [--picture queue.svg]

The exit code is 1 if a job has no result, a wrong result, or was both done and given up.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from jobs import JobFailed

from mqd.cli.verbs.demo import Broker

HERE = Path(__file__).parent
COLOURS = {"accept": "#2a9d5c", "release": "#e9a03b", "reject": "#c0392b", "killed": "#333333"}
WORDS = {"accept": "done", "release": "failed, to be tried again", "reject": "given up", "killed": "killed"}
PATIENCE_S = 300


class Workers:
    """`count` workers at a time. Each process writes its output to its own file."""

    def __init__(self, directory: Path, bootstrap: str, count: int):
        self.directory, self.started, self.running = directory, 0, {}
        self.environment = {**os.environ, "MQD_BOOTSTRAP": bootstrap}
        for place in range(count):
            self.start(place)

    def start(self, place: int) -> None:
        self.started += 1
        with open(self.directory / f"{place}-{self.started}.jsonl", "wb") as output:
            command = [sys.executable, str(HERE / "jobs.py"), "tasks:queue"]
            self.running[place] = subprocess.Popen(command, cwd=HERE, env=self.environment, stdout=output)

    def kill(self, place: int) -> None:
        self.running[place].kill()
        self.running[place].wait()

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)

    def busy(self, attempts: list[dict]) -> list[int]:
        """The places of the workers that are working on a job."""
        at_work = {one["worker"] for one in attempts if "end" not in one}
        return [place for place, process in self.running.items() if process.pid in at_work]

    def attempts(self) -> list[dict]:
        """The attempts in the order of their begin: job, attempt, place, begin, end, and `fate`."""
        found = []
        for file in self.directory.glob("*.jsonl"):
            begun = {}
            for line in file.read_text().splitlines():
                one = json.loads(line) if line.endswith("}") else {}
                if one.get("event") == "begin":
                    begun = {**one, "place": int(file.stem.split("-")[0]), "begin": one["at"], "fate": "killed"}
                    found.append(begun)
                elif one:
                    begun.update(fate=one["event"], end=one["at"])
        return sorted(found, key=lambda one: one["begin"])


def send(count: int, chance: random.Random) -> dict:
    """Sends `count` jobs. Returns their Results by kind and number."""
    import tasks

    tasks.queue.create()
    square, sent = tasks.square, {}
    send_as = {
        "square": square.delay,
        "urgent": lambda number: square.apply_async([number], urgent=True),
        "later": lambda number: square.apply_async([number], countdown=round(chance.uniform(0.5, 4), 2)),
        "slow": lambda number: tasks.slow.delay(number, seconds=round(chance.uniform(0.2, 0.6), 2)),
        "flaky": tasks.flaky.delay,
        "poison": tasks.poison.delay,
    }
    for number in range(count):
        kind = chance.choices(list(send_as), [70, 10, 10, 3, 4, 3])[0]
        sent[kind, number] = send_as[kind](number)
    tasks.queue.flush()
    return sent


def collect(sent: dict) -> list[str]:
    """Waits for all results. Returns the errors in them, as text."""
    expected = {"slow": lambda n: -n, "flaky": lambda n: n}
    wrong = []
    for (kind, number), result in sent.items():
        try:
            value = result.get(timeout=PATIENCE_S)
            if kind == "poison" or value != expected.get(kind, lambda n: n * n)(number):
                wrong.append(f"{kind} {number}: {value}")
        except JobFailed as failed:
            if kind != "poison":
                wrong.append(f"{kind} {number}: {failed}")
    return wrong


def summary(sent: dict, attempts: list[dict], kills: int) -> list[str]:
    """The lines of a table of the results, by kind of job."""
    by_job = collections.defaultdict(list)
    for one in attempts:
        by_job[one["job"]].append(one["fate"])
    rows = collections.defaultdict(collections.Counter)
    for (kind, _), result in sent.items():
        fates = by_job[result.id]
        how = "given up" if "reject" in fates else "done at once" if len(fates) == 1 else "done after retries"
        rows[kind][how] += 1
        rows[kind]["interrupted by a kill"] += "killed" in fates
        rows[kind]["attempts"] += len(fates)
    columns = ["done at once", "done after retries", "given up", "interrupted by a kill", "attempts"]
    lines = [f"{'':8}" + "".join(f"{name:>23}" for name in columns)]
    lines += [f"{kind:8}" + "".join(f"{row[name]:>23}" for name in columns) for kind, row in sorted(rows.items())]
    return [*lines, f"{len(sent)} jobs, {len(attempts)} attempts, {kills} workers killed"]


def picture(attempts: list[dict], title: str) -> str:
    """The picture as SVG: a row for each worker, a bar for each attempt."""
    first = min(one["begin"] for one in attempts)
    last = max(one.get("end", one["begin"]) for one in attempts)
    places = 1 + max(one["place"] for one in attempts)
    width, height, scale = 1200, 90 + 46 * places, 1060 / max(last - first, 0.001)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="20" y="24" font-size="16">{escape(title)}</text>',
    ]
    for number, (fate, colour) in enumerate(COLOURS.items()):
        out.append(f'<rect x="{20 + 240 * number}" y="36" width="14" height="14" fill="{colour}"/>')
        out.append(f'<text x="{40 + 240 * number}" y="48">{WORDS[fate]}</text>')
    for place in range(places):
        out.append(f'<text x="20" y="{86 + 46 * place}">worker {place + 1}</text>')
    for one in attempts:
        begin, y = 110 + (one["begin"] - first) * scale, 66 + 46 * one["place"]
        wide = max((one.get("end", one["begin"]) - one["begin"]) * scale, 1)
        label = escape(f"{one['job'][:8]}, attempt {one['attempt']}: {WORDS[one['fate']]}")
        if one["fate"] == "killed":  # the whole height of the row, to be visible
            y, wide = y - 4, 3
        tall = 38 if one["fate"] == "killed" else 30
        out.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{wide:.1f}" height="{tall}" fill="{COLOURS[one["fate"]]}">'
            f"<title>{label}</title></rect>"
        )
    out.append(f'<text x="110" y="{height - 8}">0 s</text><text x="1130" y="{height - 8}">{last - first:.1f} s</text>')
    return "\n".join([*out, "</svg>"])


def main() -> int:
    options = argparse.ArgumentParser()
    for name, value in (("jobs", 1000), ("workers", 4), ("kills", 12), ("seed", 1)):
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--picture", type=Path, default=Path("queue.svg"))
    given = options.parse_args()
    chance = random.Random(given.seed)
    with Broker() as broker, tempfile.TemporaryDirectory() as directory:
        os.environ["MQD_BOOTSTRAP"] = broker.bootstrap
        workers = Workers(Path(directory), broker.bootstrap, given.workers)
        try:
            sent = send(given.jobs, chance)
            print(f"{len(sent)} jobs sent to {broker.bootstrap}; {given.workers} workers", flush=True)
            killed, deadline = 0, time.monotonic() + PATIENCE_S
            while killed < given.kills and time.monotonic() < deadline:
                attempts = workers.attempts()
                busy = workers.busy(attempts)
                if busy and len(attempts) >= (killed + 1) * len(sent) // (given.kills + 2):
                    place = chance.choice(busy)
                    workers.kill(place)
                    workers.start(place)
                    killed += 1
                time.sleep(0.02)
            wrong = collect(sent)
        finally:
            workers.stop()
        attempts = workers.attempts()
    print("\n".join(summary(sent, attempts, killed)))
    fates = {fate: {one["job"] for one in attempts if one["fate"] == fate} for fate in COLOURS}
    wrong += [f"job {job} was done and given up" for job in fates["accept"] & fates["reject"]]
    title = f"{len(sent)} jobs, {given.workers} workers, {killed} kills: which worker did which job"
    given.picture.write_text(picture(attempts, title))
    print(f"{given.picture}: which worker did which job")
    print("\n".join(wrong or ["every job has the right result"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

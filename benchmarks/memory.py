"""What a shard takes: its peak anonymous memory, loading and after, against its own tensors.

`python -m benchmarks.memory MODEL_FOLDER`: the model split in 2 and in 3, from its GGUF file and
from safetensors made of it. Prints a table; exits with 1 if a shard takes, beyond an idle shard
process without a model, more than 1.15 times the bytes of its tensors and 60 MB; tensors that are
packed count as what they would take in float32.

Safetensors that already have the stage's dtype stay mapped from the file, as memory that the system
can share and take back, but for those that lean layers put beside others. The table shows that part
on its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx

from benchmarks.resident import resident_bytes
from meshnet.topology import LayerSpan, even_spans
from services.cli.serving import free_port

FACTOR = 1.15
EXTRA_BYTES = 60e6
SAMPLE_S = 0.002
SETTLE_S = 1.0
ROOT = Path(__file__).parents[1]

# An idle shard: everything imported, nothing loaded.
IDLE = """
import sys, uvicorn
import meshnet.model.loading
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.topology import LayerSpan
from services.shard.app import create_app
from services.shard.settings import ShardSettings
app = create_app(
    ShardSettings(model="fake", layers="0-1"), stage=FakeStage(fake_facts(LayerSpan(0, 1)))
)
uvicorn.run(app, port=int(sys.argv[1]))
"""

# The same weights as safetensors: a span's names and bytes come out as those of the GGUF file.
CONVERT = """
import sys
from meshnet.model.loading import plan_stage
from meshnet.topology import LayerSpan
plan = plan_stage(sys.argv[1], LayerSpan(0, int(sys.argv[2])), "float32")
plan.read()
plan.piece.model.save_pretrained(sys.argv[3])
"""


@dataclass(frozen=True)
class Sample:
    """Memory of one shard process: anonymous at its peak and after, and mapped from files."""

    peak_bytes: int
    after_bytes: int
    mapped_bytes: int
    tensor_bytes: int


@dataclass(frozen=True)
class Row:
    source: str
    span: LayerSpan
    sample: Sample
    idle: Sample

    @property
    def taken(self) -> int:
        return max(self.sample.peak_bytes, self.sample.after_bytes) - self.idle.after_bytes

    @property
    def allowed(self) -> float:
        return FACTOR * self.sample.tensor_bytes + EXTRA_BYTES

    def __str__(self) -> str:
        after = self.sample.after_bytes - self.idle.after_bytes
        mapped = self.sample.mapped_bytes - self.idle.mapped_bytes
        cells = [self.sample.tensor_bytes, self.taken, after, self.allowed, mapped]
        numbers = " | ".join(f"{cell / 1e6:.0f}" for cell in cells)
        verdict = "yes" if self.taken <= self.allowed else "NO"
        return f"| {self.source} | {self.span} | {numbers} | {verdict} |"


def sample_process(command: list[str], port: int) -> Sample:
    """Run a shard until it is ready and has settled; watch its memory from outside."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        peak, total = 0, 0
        ready_at: float | None = None
        next_look = 0.0
        while ready_at is None or time.monotonic() < ready_at + SETTLE_S:
            peak = max(peak, resident_bytes(process.pid, "RssAnon"))
            if ready_at is None and time.monotonic() >= next_look:
                next_look = time.monotonic() + 0.1
                readiness = _readiness(port)
                if readiness.get("state") == "ready":
                    ready_at, total = time.monotonic(), int(str(readiness["total_bytes"]))
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended with {process.returncode}")
            time.sleep(SAMPLE_S)
        after, mapped = (resident_bytes(process.pid, kind) for kind in ("RssAnon", "RssFile"))
        return Sample(peak, after, mapped, total)
    finally:
        process.terminate()
        process.wait()


def _readiness(port: int) -> dict[str, object]:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).json()
    except httpx.HTTPError:
        return {}


def measure(model: Path, n_layers: int) -> list[Row]:
    port = free_port()
    idle = sample_process([sys.executable, "-c", IDLE, str(port)], port)
    print(f"An idle shard process without a model: {idle.after_bytes / 1e6:.0f} MB.")
    print("All in MB, beyond that process.\n")
    print("| weights | layers | tensors | peak | after | allowed | mapped | within |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        converted = _as_safetensors(model, n_layers, Path(folder))
        sources = [
            ("GGUF", model, "fp32", (2, 3)),
            ("safetensors", converted, "fp32", (2, 3)),
            ("GGUF, int8", model, "int8", (2,)),
            ("GGUF, int4", model, "int4", (2,)),
        ]
        for source, path, weights, counts in sources:
            for span in chain.from_iterable(even_spans(n_layers, count) for count in counts):
                row = Row(source, span, _sample_shard(path, span, weights), idle)
                print(row, flush=True)
                rows.append(row)
    return rows


def _sample_shard(model: Path, span: LayerSpan, weights: str) -> Sample:
    port = free_port()
    options = ["--model", str(model), "--layers", str(span), "--port", str(port)]
    options += ["--weights", weights]
    return sample_process([sys.executable, "-m", "services.cli", "shard", *options], port)


def _as_safetensors(model: Path, n_layers: int, folder: Path) -> Path:
    command = [sys.executable, "-c", CONVERT, str(model), str(n_layers), str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    shutil.copy(model / "config.json", folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    rows = measure(parser.parse_args().model.resolve(), n_layers=30)
    return 0 if all(row.taken <= row.allowed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

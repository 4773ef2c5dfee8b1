"""lm_eval's `local-completions` over the mesh gives what transformers gives on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clients.mesh import MODEL, PYTHON, ROOT, Mesh

pytestmark = pytest.mark.timeout(900)  # 160 scored prompts twice, and a model to load

TASK = "meshnet_choices"


def _evaluate(mesh: Mesh, folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """The accuracy that lm_eval reports, and its log of samples."""
    arguments = f"model={mesh.model},base_url={mesh.base_url}/completions,num_concurrent=4"
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", f"{arguments},tokenizer_backend=remote"),
            *("--tasks", TASK, "--include_path", "tests/clients/lm_eval_task"),
            *("--output_path", str(folder / "results"), "--log_samples"),
        ],
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},  # noqa: TID251  # handed on
        check=True,
    )
    (results,) = folder.glob("results/**/results_*.json")
    (samples,) = folder.glob("results/**/samples_*.jsonl")
    accuracy = json.loads(results.read_text())["results"][TASK]["acc,none"]
    return accuracy, [json.loads(line) for line in samples.read_text().splitlines()]


def _reference(samples: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    """For each choice of each sample, what unsplit transformers says."""
    pairs = [pair for sample in samples for pair in _pairs(sample)]
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.support.loglikelihoods", str(MODEL)],
        cwd=ROOT,
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = iter(json.loads(done.stdout))
    return [[next(answers) for _ in _pairs(sample)] for sample in samples]


def _pairs(sample: dict[str, Any]) -> list[tuple[str, str]]:
    arguments = sample["arguments"]
    return [(one["arg_0"], one["arg_1"]) for one in arguments.values()]


def _answers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """For each choice, the log-likelihood, and whether it is greedy; the log spells them out."""
    return [(float(value), greedy == "True") for ((value, greedy),) in sample["resps"]]


def test_same_as_transformers(mesh: Mesh, tmp_path: Path) -> None:
    """The accuracy is the same, log-likelihoods to 1e-3, and what is greedy; without torch."""
    assert find_spec("torch") is None
    accuracy, samples = _evaluate(mesh, tmp_path)
    reference = _reference(samples)
    assert len(samples) == 40
    for sample, expected in zip(samples, reference, strict=True):
        values, greedy = zip(*_answers(sample), strict=True)
        expected_values, expected_greedy = zip(*expected, strict=True)
        assert values == pytest.approx(expected_values, abs=1e-3, rel=0)
        assert greedy == expected_greedy
    right = [
        expected.index(max(expected)) == int(sample["target"])
        for sample, expected in zip(samples, reference, strict=True)
    ]
    assert accuracy == pytest.approx(sum(right) / len(right))

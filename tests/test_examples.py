# SPDX-License-Identifier: Apache-2.0
"""Every example runs, on small data and for few steps, and draws its picture."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from numpyro import handlers
from scipy import sparse

import numpyro_gpaug as gpaug

EXAMPLES = Path(__file__).parents[1] / "examples"
# test_distributed.py tests the other one.
SCRIPTS = sorted({p.stem for p in EXAMPLES.glob("*.py")} - {"distributed"})
FEW = ["--steps", "2", "--inducing", "8"]
REDUCED = {
    "bayesian_svm": ["--data", "binary.npz", "--folds", "2", *FEW],
    "classify": ["--data", "binary.npz", "--no-progress", *FEW],
    "function_space_images": ["--data", "images.npz", "--width", "8", *FEW],
    "heteroscedastic": ["--num", "40", "--steps", "2"],
    "learned_link": ["--data", "binary.npz", *FEW],
    "mixed_model": ["--draws", "20", "--points", "64"],
    "multiclass": ["--data", "classes.npz", *FEW],
    "multilabel": ["--epochs", "2", "--rank", "8", "--latents", "2", *FEW],
}


def run(script: str, folder: Path, *options: str) -> str:
    """Return the output of a script run in ``folder``. It reads programs that another
    script has compiled.
    """
    # A collection after every 700 objects takes a twelfth of the time.
    (folder / "sitecustomize.py").write_text("import gc; gc.set_threshold(100_000)")
    paths = os.pathsep.join(map(str, (EXAMPLES.parent, folder)))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{script}.py"), *options],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def found_by(benchmark: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return what a benchmark writes."""
    run(f"benchmarks/{benchmark}", folder, *options, "--json", "found.json")
    return json.loads((folder / "found.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small data of every kind the examples read."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    np.savez(tmp_path / "binary.npz", X=X, y=(X[:, 0] > 0).astype(int))
    y = np.arange(60) % 3
    np.savez(tmp_path / "classes.npz", X=X + 2 * y[:, None], y=y)
    np.savez(tmp_path / "images.npz", X=rng.uniform(size=(60, 4, 4)), y=y)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs_and_draws(script: str, folder: Path) -> None:
    from matplotlib.image import imread

    before = {p.name for p in folder.iterdir()}
    run(script, folder, *REDUCED[script])
    assert {p.name for p in folder.iterdir()} - before >= {f"{script}.png"}
    picture = imread(folder / f"{script}.png")
    inked = np.mean(picture[..., :3].min(-1) < 0.9)
    assert inked > 0.01, "the picture is blank"


@pytest.mark.parametrize("script", ["bayesian_svm", "classify"])
def test_the_model_of_an_example_is_as_its_guide_advises(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning of the guide is an error here."""
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module(script).model
    X, y = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 2
    gpaug.AutoSparseGP(model).setup(X, y, inducing=X[:4])


@pytest.mark.slow
def test_neither_chains_nor_threads_hang(tmp_path: Path) -> None:
    found = json.loads(run("benchmarks/threads", tmp_path, "--runs", "1"))
    assert {kind: counts["hangs"] for kind, counts in found.items()} == {
        "chains": 0, "vectorized": 0, "fits": 0
    }  # fmt: skip


@pytest.mark.slow
def test_drawn_classes_err_as_all_classes_do(tmp_path: Path) -> None:
    steps = ["--drawn", "3", "--steps", "10", "--drawn-steps", "200"]
    size = ["--train", "500", "--inducing", "40"]
    found = found_by("class_subsampling", tmp_path, *steps, *size)["results"]
    errors = {row["way"]: row["error"] for row in found}
    assert set(errors) == {"whole", "sampled", "normalised"}
    assert max(errors.values()) < errors["whole"] + 0.05


@pytest.mark.slow
def test_benchmark_of_crossed_effects_runs_at_small_sizes(tmp_path: Path) -> None:
    # The second has binary data, in both forms.
    cases = ["--cases", "normal", "exact"]
    normal, exact = found_by("crossed", tmp_path, "--quick", *cases)["rows"]
    assert normal["noise"] < 0.05
    assert normal["error"] < 0.2
    assert exact["sds"] < 0.03


@pytest.mark.slow
def test_benchmark_of_many_responses(tmp_path: Path) -> None:
    size = ["--responses", "8", "--rows", "40", "--subjects", "4", "--single", "2"]
    printed = run("benchmarks/many_responses", tmp_path, *size, "--x64")
    found = json.loads(printed)
    assert found["verdicts"] == {"converged": 8}
    assert max(found["apart"].values()) < 1e-6


@pytest.mark.slow
def test_benchmark_of_first_results_runs_with_a_rival(tmp_path: Path) -> None:
    cases = ["--cases", "days", "--methods", "here", "nuts", "--draws", "20"]
    found = found_by("felt", tmp_path, *cases, "--many", "30")["rows"]
    assert [x["case"] for x in found[:2]] == ["days here", "days nuts"]
    assert {"imports", "tenth", "served", "other"} <= found[0].keys()
    assert found[0]["cached"] > 0
    assert found[1]["second"] > 0


@pytest.mark.slow
def test_recipe_is_not_worse_than_logistic_regression(tmp_path: Path) -> None:
    size = ["--sets", "breast_cancer", "--splits", "1", "--inducing", "50"]
    found = found_by("recipe", tmp_path, *size)["results"]
    nll = {row["method"]: row["nll"] for row in found}
    assert set(nll) == {"logistic", "now", "before"}
    assert nll["now"] < nll["logistic"] + 0.03


@pytest.mark.parametrize("writable", [True, False])
def test_compiled_programs_are_kept_where_a_folder_can_be_written(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    support = importlib.import_module("support.compilation")
    caches = tmp_path / "caches"
    if not writable:
        caches.touch()
    options: dict[str, object] = {"jax_compilation_cache_dir": None}
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=options.__setitem__)
    monkeypatch.setattr(support, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    expected = caches / "numpyro_gpaug" if writable else None
    assert support.keep_compiled_programs() == expected
    assert options["jax_compilation_cache_dir"] == (expected and str(expected))


def test_multilabel_takes_data_with_few_rows_and_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("multilabel")
    rng = np.random.default_rng(0)
    Y = sparse.csr_array(rng.integers(0, 2, (12, 3)).astype(np.int8))
    data = script.multilabel.MultiLabelData(
        sparse.csr_array(rng.normal(size=(12, 4))), Y
    )
    problem = script.Problem(data, data, None)
    args = script.capped(script.parse(["--free"]), data)
    assert script.first_values(problem, args)["loadings"].shape == (3, 3)
    sampler = script.multilabel.LabelSampler(Y, args.batch_size, args.negatives)
    (batch,) = sampler.epoch(0)
    assert len(batch.rows) == 12
    scores = SimpleNamespace(
        predict_f=lambda X, labels, size: SimpleNamespace(mean=Y.toarray())
    )
    assert len(script.precisions(scores, problem)) == 2  # at 1 and 3, not at 5


def test_mixed_model_reads_tables_as_r_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("mixed_model")
    rows = '"1","10",2,14,"1"', '"2","9",3,12,"1"', '"3","9",0,9,"2"'
    text = "\n".join(['"","herd","incidence","size","period"', *rows])
    (tmp_path / "cbpp.csv").write_text(text)
    table = pd.read_csv(tmp_path / "cbpp.csv")
    data = script.encode(table, script.parse([]))
    assert [*data.herds] == [9, 10]
    np.testing.assert_array_equal(data.herd, [1, 0, 0])
    np.testing.assert_array_equal(data.X, [[1, 0], [1, 0], [1, 1]])
    np.testing.assert_array_equal([data.y, data.total], [[2, 3, 0], [14, 12, 9]])
    assert data.effects == ["intercept", "period 2"]
    with pytest.raises(SystemExit, match="no whole successes.*'incidence': 10"):
        script.encode(table.assign(incidence=10), script.parse([]))
    with pytest.raises(SystemExit, match="no column.*'farm'"):
        script.encode(table, script.parse(["--group", "farm"]))


def test_table_of_links_takes_folds_with_fewer_rows_than_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    script = importlib.import_module("papers_links")
    options = {"link": "learnt link", "real": False, "batch": script.BATCH}

    def chosen(X: jax.Array, y: jax.Array) -> Any:
        model = handlers.trace(handlers.seed(script.model, 0))
        return model.get_trace(X, y, start=1.0, Z=X[:3], **options)["data"]["value"]

    X, y = np.zeros((12, 2), np.float32), np.zeros(12, np.int32)
    assert jax.eval_shape(chosen, X, y).shape == (12,)


def test_errata_are_what_brute_force_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    for line in importlib.import_module("errata").lines():
        np.testing.assert_allclose(line.right, line.checked, atol=1e-5, err_msg=line)
        assert abs(line.printed - line.right) > 0.01, line


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_has_options_for_data_and_seed(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(script).parse(["--help"])
    text = capsys.readouterr().out
    assert "--data" in text
    assert "--seed" in text

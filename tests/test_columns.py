# SPDX-License-Identifier: Apache-2.0
"""Columns of tables as arguments: numbers, missing values, categories, dates."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.columns import Columns
from tests.problems import unfitted

KEY = jax.random.key(0)
TABLE = pd.DataFrame(
    {
        "dose": [0.1, 0.5, 1.5, 0.3, 0.8, 1.1],
        "herd": pd.Categorical(["north", "west", "east", "west", "north", "east"]),
        "year": pd.Categorical([2019, 2020, 2020, 2019, 2020, 2019]),
        "count": pd.array([1, 4, 2, 0, 3, None], dtype="Int64"),
        "day": pd.date_range("2024-01-01", periods=6),
        "name": ["a", "b", "c", "d", "e", "f"],
    }
)


def model(dose, herd, year, y=None):
    with numpyro.plate("years", 2, dim=-1), numpyro.plate("herds", 4, dim=-2):
        both = numpyro.sample("both", dist.Normal(0, 1))
    with numpyro.plate("herds", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    eta = effect[herd] + both[herd, year] * dose
    known = True if y is None else ~jnp.isnan(y)
    with numpyro.plate("data", len(dose)), numpyro.handlers.mask(mask=known):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def read(value, known=None):
    found = Columns.read(lambda x: None, (value,), {}, known)
    return found.args[0], found.labels.get("x")


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (TABLE["dose"], "f"),
        (TABLE["count"], "f"),
        (TABLE["count"][:5], "i"),
        (TABLE["dose"].astype("Float64"), "f"),
        (TABLE["dose"].astype(object), "f"),
        ((TABLE["dose"] > 1).astype("boolean"), "b"),
        (TABLE["count"].astype("int64[pyarrow]"), "f"),
        (TABLE[["dose", "count"]], "f"),
    ],
)
def test_numbers_become_arrays(column, dtype) -> None:
    found, labels = read(column)
    assert type(found) is np.ndarray
    assert found.dtype.kind == dtype
    assert labels is None
    expected = column.astype(float).to_numpy(float, na_value=np.nan)
    np.testing.assert_array_equal(found.astype(float), expected)


def test_categories_become_codes() -> None:
    for column in (TABLE["herd"], TABLE["herd"].array, pd.Index(TABLE["herd"])):
        codes, labels = read(column)
        assert labels == ("east", "north", "west")
        np.testing.assert_array_equal(codes, TABLE["herd"].cat.codes)
    assert read(TABLE["year"])[1] == ("2019", "2020")
    known = {"x": ("west", "east", "north")}
    text = TABLE["herd"].astype(str)
    for column in (TABLE["herd"], text, text.to_numpy(str)):
        codes, _ = read(column, known)
        np.testing.assert_array_equal(codes[:2], [2, 0])
    plain = np.arange(3)
    assert read(plain, known)[0] is plain


@pytest.mark.parametrize("names", [("a", "b"), (0, 1)])
def test_columns_of_tables_are_found_by_name(names) -> None:
    def model(x):
        return x

    first, second = names
    table = pd.DataFrame({first: [1.0, 2.0], second: [3.0, 4.0]})
    labels = Columns.read(model, (table,), {}).labels
    (again,), *_ = Columns.read(model, (table[[second, first]],), {}, labels)
    np.testing.assert_array_equal(again, table)
    with pytest.raises(ValueError, match=f"x lacks the column '{second}' of the fit"):
        Columns.read(model, (table[[first]],), {}, labels)
    with pytest.raises(ValueError, match="x has columns of the same name"):
        Columns.read(model, (table[[first, first]],), {}, labels)


def test_arrow() -> None:
    arrow = pytest.importorskip("pyarrow")
    names = arrow.array(["b", "a", "b"])
    for column in (names, arrow.chunked_array([names])):
        codes, labels = read(column.dictionary_encode())
        assert labels == ("b", "a")
        np.testing.assert_array_equal(codes, [0, 1, 0])
        with pytest.raises(TypeError, match="x contains text"):
            read(column)
    np.testing.assert_array_equal(read(arrow.array([1, None]))[0], [1, np.nan])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (TABLE["name"], "x contains text. Convert it by .astype"),
        (TABLE["day"], r"x contains dates. Pass numbers, such as days since"),
        (pd.Index(TABLE["day"]), "x contains dates"),
        (TABLE["day"].dt.tz_localize("UTC"), "x contains dates"),
        (TABLE["day"].dt.to_period("D"), r"x contains periods.*: x.astype\('int64'\)"),
        (TABLE["day"] - TABLE["day"][0], r"x contains durations.*timedelta64\(1, 'D'"),
        (TABLE[["dose", "herd"]], "column 'herd' of x contains categories"),
    ],
)
def test_what_is_no_number(column, message) -> None:
    with pytest.raises(TypeError, match=message):
        read(column)


def test_missing_categories_and_new_ones() -> None:
    gaps = TABLE["herd"].where(TABLE.index != 3)
    with pytest.raises(
        ValueError, match="x has missing values .1., the first in row 3"
    ):
        read(gaps)
    with pytest.raises(ValueError, match="x has 'south', which is not among"):
        read(np.array(["south"]), {"x": ("north", "east")})
    with pytest.raises(ValueError, match="x contains categories, and contained numb"):
        read(TABLE["herd"], {})
    for kind in (np.array, pd.Series, jnp.array):
        with pytest.warns(UserWarning, match="x has numbers.*: 2 is the category '3'"):
            read(kind([1, 2]), {"x": ("0", "1", "3", "2")})
        with pytest.warns(UserWarning, match="the category '1.0' pass this text"):
            read(kind([1, 2]), {"x": ("1.0", "2.0", "3.0")})
    read(np.array([1, 4]), {"x": ("0", "1", "3", "2")})  # a new member


def test_summaries_have_labels_and_predictions_take_them(tmp_path) -> None:
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    columns = [TABLE[k] for k in ("dose", "herd", "year")]
    fit = svi.run(KEY, 10, *columns, TABLE["count"], progress_bar=False)
    posterior = svi.posterior(fit)
    rows = list(posterior.summary().index)
    # The plate has a fourth herd, without rows.
    assert [x for x in rows if x.startswith("effect")] == [
        "effect[east]", "effect[north]", "effect[west]", "effect[3]"
    ]  # fmt: skip
    assert rows[0] == "both[east, year 2019]"
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    assert list(loaded.summary().index) == rows
    dose = np.ones(2, "float32")
    by_code = posterior.predict_y(dose, np.array([2, 0]), np.array([1, 1]))
    for one in (posterior, loaded):
        # Other categories, in another order.
        herds = pd.Series(["west", "east"], dtype=pd.CategoricalDtype(["west", "east"]))
        by_label = one.predict_y(dose, herds, np.array(["2020", "2020"]))
        np.testing.assert_allclose(by_label.mean, by_code.mean, rtol=1e-6)
    found = posterior.average(*columns, at={"herd": ["east", "west"]})
    assert found.draws.shape == (1000, 2)
    loss = svi.evaluate(fit.state, *columns, TABLE["count"])
    np.testing.assert_allclose(loss, fit.losses[-1], rtol=0.1)
    # A state has no labels: codes are those of the fit.
    columns[1] = TABLE["herd"].cat.reorder_categories(["west", "north", "east"])
    assert svi.evaluate(fit.state, *columns, TABLE["count"]) == loss
    again = svi.posterior(fit.params, *columns, TABLE["count"])
    assert list(again.summary().index) == rows
    state = svi.init(KEY, *columns, TABLE["count"])
    with pytest.raises(ValueError, match="herd: fits of this .* different labels"):
        svi.update(state, *columns, TABLE["count"])
    columns[1] = TABLE["herd"]
    tree = gpaug.diagnostics.to_datatree(
        KEY, model, svi.guide, fit.params, *columns, TABLE["count"], num_samples=4
    )
    for group in ("posterior", "prior"):
        herds = tree[group]["effect"].coords["herds"]
        assert herds.values.tolist() == ["east", "north", "west", "3"]
    # The missing count is no observation.
    assert np.isnan(tree["observed_data"]["y"]).values.tolist() == [False] * 5 + [True]


def test_all_predictions_take_columns() -> None:
    def plain(dose, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("data", len(dose)):
            numpyro.sample("y", dist.Normal(slope * dose, 1), obs=y)

    svi = gpaug.ConjugateSVI(plain, gpaug.AutoLatentGaussian(plain))
    dose, y = TABLE["dose"], TABLE["count"].fillna(2)
    arrays = dose.to_numpy(), y.to_numpy(float)
    fit = svi.run(KEY, 10, dose, y, progress_bar=False)
    posterior = svi.posterior(fit)
    groups = TABLE["herd"]
    for found, expected in (
        (posterior.leave_one_out(dose, y), posterior.leave_one_out(*arrays)),
        (posterior.leave_out(groups, dose, y), posterior.leave_out(groups, *arrays)),
    ):
        np.testing.assert_array_equal(found.mean, expected.mean)
    collapsed = gpaug.collapse(plain).posterior({}, dose, y)
    np.testing.assert_allclose(
        collapsed.predict_y(dose).mean, posterior.predict_y(dose).mean, rtol=1e-4
    )
    # A dict of columns is one argument.
    found, _ = read({"a": TABLE["dose"], "b": TABLE["herd"]})
    assert found["b"].tolist() == TABLE["herd"].cat.codes.tolist()
    with pytest.raises(TypeError, match="is a Series, and arrays are needed here"):
        gpaug.TraceAnalytic_ELBO().loss(KEY, fit.params, plain, svi.guide, dose, y)


def test_integrated_hyperparameters_have_labels_beside_them() -> None:
    def integrated(herd, y=None):
        # As many numbers as herds, which are not the herds'.
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([3]).to_event(1))
        with numpyro.plate("herds", 3):
            effect = numpyro.sample("effect", dist.Normal(0, tau[0]))
        with numpyro.plate("data", len(herd)):
            numpyro.sample("y", dist.Normal(effect[herd], 1), obs=y)

    nested = gpaug.NestedVI(integrated, num_points=64, progress_bar=False)
    nested.run(KEY, TABLE["herd"], TABLE["dose"])
    names = [*(f"effect[{x}]" for x in ("east", "north", "west"))]
    names += [f"tau[{i}]" for i in range(3)]
    assert sorted(nested.summary().index) == sorted(names)
    tree = gpaug.diagnostics.to_datatree(KEY, nested)
    herds = tree["posterior"]["effect"].coords["effect_dim_0"]
    assert herds.values.tolist() == ["east", "north", "west"]
    assert sorted(nested.posterior().summary().index) == sorted(names)
    svi = gpaug.ConjugateSVI(integrated, gpaug.AutoLatentGaussian(integrated), None)
    responses = np.stack([TABLE["dose"], -TABLE["dose"]])
    fits = svi.run_many(KEY, 20, TABLE["herd"], responses, over="y", progress_bar=False)
    by_code = fits.posterior(0).predict_y(np.array([2, 0]))
    by_label = fits.posterior(0).predict_y(np.array(["west", "east"]))
    np.testing.assert_array_equal(by_label.mean, by_code.mean)


def test_labels_are_those_of_the_members_that_data_index() -> None:
    def weekly(week, herd, district, y=None, *, weeks=4):
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(1.0, weeks))
        with numpyro.plate("districts", 5):
            place = numpyro.sample("place", dist.Normal(0, 1))
        with numpyro.plate("data", len(week)):
            mean = walk[week] + place[district[herd]]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    svi = gpaug.ConjugateSVI(weekly, gpaug.AutoLatentGaussian(weekly))
    given = TABLE["herd"], TABLE["herd"], np.array([3, 0, 4]), TABLE["dose"]
    posterior = unfitted(svi, *given, weeks=3)
    # Herds are not districts.
    expected = [*(f"walk[{x}]" for x in ("east", "north", "west"))]
    expected += [f"place[{i}]" for i in range(5)]
    assert list(posterior.summary().index) == expected
    # Codes 0 to 2 need not be the first three of four weeks.
    wrong = "'walk' has 4 members in an order, and 'week' indexes it by 3 labels"
    with pytest.raises(ValueError, match=wrong):
        gpaug.NestedVI(weekly, progress_bar=False).run(KEY, *given)


def test_text_without_an_order_is_no_ordinal_response() -> None:
    def ratings(dose, rating):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", len(dose)):
            fn = dist.OrderedLogistic(level + dose, jnp.array([-1.0, 1.0]))
            numpyro.sample("rating", fn, obs=rating)

    names = ["low", "mid", "high"]
    text = pd.Series(names * 2, dtype="category")
    nested = gpaug.NestedVI(ratings)
    svi = gpaug.ConjugateSVI(ratings, gpaug.AutoLatentGaussian(ratings))
    for run in (nested.run, lambda *args: svi.run(args[0], 1, *args[1:])):
        with pytest.raises(ValueError, match="'rating' is ordinal.* high, low, mid. P"):
            run(KEY, TABLE["dose"], text)
    ordered = pd.Categorical(text, names, ordered=True)
    posterior = unfitted(svi, TABLE["dose"], ordered)
    shares = posterior.average(TABLE["dose"]).summary()
    assert list(shares.index) == names

# SPDX-License-Identifier: Apache-2.0
"""The sites of a model, and those whose own distribution is Gaussian."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug._numpyro import is_scanned
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.kernels._base import has_constants
from numpyro_gpaug.gp.markov import MarkovConditional
from numpyro_gpaug.likelihoods.expectations import base_distribution, is_masked
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.correlated_data import correlated_axes
from numpyro_gpaug.model.gaussians import field, whitening
from numpyro_gpaug.model.latents import GaussianSite
from numpyro_gpaug.model.observations import unobserved_error
from numpyro_gpaug.model.plates import trace_plates, with_whole_sizes
from numpyro_gpaug.model.program import check_indices, program_of_sites
from numpyro_gpaug.model.structure import Block, Trace, is_improper, run_model

IMPROPER = (
    "its prior is flat. With a wide one, such as dist.Normal(0, 100), it would be "
    "Gaussian"
)
SCALED = "its density is scaled, by handlers.scale or a plate that is subsampled"


class Survey:
    """The sites of a model, from a trace without arithmetic.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param data: names of observed sites, where they are not observed.
    :ivar latent: names of latent sites; ``discrete`` names the discrete ones.
    :ivar observed: names of observed sites. ``classes`` has their distributions, and
        ``correlated`` the number of their correlated axes. ``limited`` names sites
        whose observations are continuous and not any real numbers.
    :ivar candidates: latents that may be part of a joint Gaussian. ``scanned`` names
        the ones in a ``scan``, and ``fields`` has the coordinates of the ones with a
        sparse precision.
    :ivar held: latents that are fixed at a point estimate, each with the reason.
    :ivar blocks: processes and vector normals, and ``inputs`` the shapes of their
        inputs. ``chains`` names processes that are chains, ``rounded`` processes whose
        covariances have the rounding errors of the prior variance, ``loaded`` processes
        whose outputs share latents, and ``uncalled`` inducing values of processes that
        are not called.
    :ivar shapes: shapes of values; ``functions`` has shapes of function values.
    :ivar constraints: constraints of params.
    :ivar inside: the plates around each site.
    :ivar dtype: the dtype of the Gaussian.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        data: tuple[str, ...] = (),
    ) -> None:
        self.model, self.arguments, self._data = model, arguments, data
        self.classes: dict[str, type] = {}
        self.candidates: list[GaussianSite] = []
        self.latent: list[str] = []
        self.observed: list[str] = []
        self.correlated: dict[str, int] = {}
        self.constraints: dict[str, Any] = {}
        self.held: list[tuple[str, str]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.fields: dict[str, Any] = {}
        self.functions: dict[str, jax.ShapeDtypeStruct] = {}
        self.loaded: set[str] = set()
        self.scanned: list[str] = []
        self.inside: dict[str, set[str]] = {}
        self.blocks: list[Block] = []
        self.inputs: dict[str, jax.ShapeDtypeStruct] = {}
        self.chains: list[str] = []
        self.rounded: list[str] = []
        self.uncalled: list[str] = []
        self.discrete: list[str] = []
        self.limited: list[str] = []
        dtypes: list[Any] = []

        def abstract(arrays: tuple[Array, ...]) -> Trace:
            given = Arguments(arrays, arguments.static)
            whole, key = with_whole_sizes(model), jax.random.key(0)
            trace = run_model(whole, given, key, {})
            self._visit(trace, arrays)
            found = [trace[site.name]["value"] for site in self.candidates]
            dtypes.extend(map(jnp.result_type, found))
            return trace

        self.plates = trace_plates(abstract, arguments)
        self.dtype = jnp.result_type(*dtypes) if dtypes else jnp.result_type(float)

    def refuse(self, latents: Iterable[str]) -> None:
        """Raise for latents that no guide supports.

        :param latents: names of latent sites.
        :raises NotConjugateError: for discrete latents, and data that are missing.
        :raises ValueError: for a discrete latent of a model that observes nothing.
        """
        for name in latents:
            if name.endswith("_unobserved"):
                raise NotConjugateError(
                    f"obs_mask makes {name!r} a latent. Mask missing observations by "
                    "numpyro.handlers.mask(mask=obs_mask) around the site instead"
                )
            if name in self.discrete and not self.observed:
                raise unobserved_error([name])
            if name in self.discrete:
                raise NotConjugateError(
                    f"the latent site {name!r} is discrete. If it is data, pass the "
                    "model its values (obs=...). Otherwise sum it out (a mixture "
                    "likelihood), or sample the model by MCMC"
                )

    def check_codes(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        """Raise for codes that are outside of the sites that they index, and return
        whether there are any codes.

        :param shapes: shapes of the sites, latents or function values, by name.
        """
        if not any(shapes.values()):
            return False
        given = self.model, self.arguments, shapes
        program = program_of_sites(*given, {}, self.dtype)
        check_indices(program)
        return any(program.gathers())

    def _is_data(self, site: dict[str, Any]) -> bool:
        return site.get("is_observed", False) or site["name"] in self._data

    def _row_plates(self, trace: Trace, arrays: tuple[Array, ...]) -> set[str]:
        """Return the plates of data that have new members in a prediction. If the data
        are in one plate, it is this plate. If they form a table, in several plates, it
        is the plate in which the first input has a row for each member, if there is
        one; members of the other plates are matched with the fit by index."""
        data = [s for s in trace.values() if s["type"] == "sample" and self._is_data(s)]
        inputs = [
            x for x in arrays if x.ndim and all(x is not s["value"] for s in data)
        ]
        found = set()
        for site in data:
            frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
            if len(frames) > 1:
                rows = [f for f in frames if inputs and f.size == len(inputs[0])]
                frames = rows[:1]
            found |= {frame.name for frame in frames}
        return found

    def _visit(self, trace: Trace, arrays: tuple[Array, ...]) -> None:
        rows = self._row_plates(trace, arrays)
        called = {
            f"{name}.v": name
            for name, site in trace.items()
            if isinstance(site.get("fn"), Conditional)
        }
        for name, site in trace.items():
            if site["type"] == "param":
                constraint = site["kwargs"].get("constraint", constraints.real)
                self.constraints[name] = constraint
            elif site["type"] == "sample":
                self.shapes[name] = jnp.shape(site["value"])
                self.inside[name] = {f.name for f in site["cond_indep_stack"]}
                if self._is_data(site):
                    self.observed.append(name)
                    self.classes[name] = type(base_distribution(site["fn"]))
                    self.correlated[name] = correlated_axes(site["fn"])
                    if _is_limited(site["fn"]):
                        self.limited.append(name)
                else:
                    self.latent.append(name)
                    self._visit_block(name, site, called)
                    self._visit_latent(name, site, rows)
            elif isinstance(site.get("fn"), Conditional):
                f = site["fn"]
                self.functions[name] = jax.ShapeDtypeStruct(f.shape, f.dtype)
                if f.outputs.loadings is not None:
                    self.loaded.add(name)
                if isinstance(f, MarkovConditional):
                    self.chains.append(name)
                elif f.gp.jitter is not None or not has_constants(f.gp.kernel):
                    self.rounded.append(name)
        for name in (n for b in self.blocks for n in (b.name, b.site)):
            value = trace[name]["value"]
            self.inputs[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)

    def _visit_block(
        self, name: str, site: dict[str, Any], called: dict[str, str]
    ) -> None:
        """Note a latent that may have a Gaussian of its own.

        :param called: names of the processes that are called, by site.
        :raises NotConjugateError: for a constant.
        """
        if isinstance(base_distribution(site["fn"]), dist.Delta):
            raise NotConjugateError(
                f"the latent site {name!r} is a constant, dist.Delta. Use "
                "numpyro.deterministic"
            )
        if site["fn"].is_discrete:
            self.discrete.append(name)
        if name not in called and name == f"{site['infer'].get('process')}.v":
            self.uncalled.append(name)
        elif name in called or _is_vector_normal(site):
            self.blocks.append(_block(called.get(name, name), name, site))

    def _visit_latent(self, name: str, site: dict[str, Any], rows: set[str]) -> None:
        """Classify a latent site: Gaussian, fixed at a point estimate, or other.

        :param rows: plates of data.
        """
        found = whitening(site["fn"])
        support = getattr(site["fn"], "support", None)
        anywhere = getattr(support, "base_constraint", support)
        if is_improper(site) and anywhere is constraints.real:
            self.held.append((name, IMPROPER))
        if is_masked(site["fn"]):
            self.held.append((name, "its prior is masked"))
        if found is None:
            return
        if site["scale"] is not None:
            self.held.append((name, SCALED))
            return
        local = any(frame.name in rows for frame in site["cond_indep_stack"])
        known = tuple(found.shape), self.shapes[name]
        base = base_distribution(site["fn"])
        walks = isinstance(base, dist.GaussianRandomWalk)
        ordered = base.event_dim if found.mixes or walks else 0
        self.candidates.append(GaussianSite(name, *known, local, ordered))
        if is_scanned(site):
            self.scanned.append(name)
        elif own := field(site["fn"]):
            self.fields[name] = own


def _is_limited(fn: Any) -> bool:
    support = base_distribution(fn).support
    anywhere = support is None or support in (constraints.real, constraints.real_vector)
    return not (anywhere or support.is_discrete)


def _block(name: str, site: str, message: dict[str, Any]) -> Block:
    value = message["value"]
    # The dtype of the prior, not of the draw, which NumPyro makes in the default dtype.
    # Normal(0, 1) has integer parameters.
    dtype = jnp.result_type(base_distribution(message["fn"]).loc)
    floating = jnp.issubdtype(dtype, jnp.floating)
    return Block(name, site, value.shape, dtype if floating else value.dtype)


def _is_vector_normal(site: dict[str, Any]) -> bool:
    fn = site["fn"]
    vector = len(fn.event_shape) == 1 and fn.batch_shape == ()
    plain = isinstance(base_distribution(fn), dist.Normal) and not is_masked(fn)
    return vector and plain and not site["cond_indep_stack"]

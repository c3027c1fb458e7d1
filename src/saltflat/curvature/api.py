"""The engine's front door: traces, diagonals, spectra, and the matrices as operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.checks import check_choice, check_integer, check_number, check_seed
from saltflat.curvature.curvature import Curvature, Findings
from saltflat.curvature.estimators import Estimator, check_estimator
from saltflat.curvature.loss_hessian import derivatives_explained
from saltflat.curvature.plan import Certify, Settings
from saltflat.curvature.products import MatrixName
from saltflat.curvature.spectrum import Coordinates
from saltflat.curvature.sweep import Kind
from saltflat.distributed import reduction
from saltflat.errors import InvalidType, InvalidValue, ModelError, NotApplicable, nearest
from saltflat.losses import LossLike
from saltflat.measurement import shortfall
from saltflat.prints import checksum
from saltflat.result import Density, Diagonal, Eigenvalue, Eigenvalues, Trace, Value
from saltflat.risk import Output, Risk, Unpack
from saltflat.subsample import NO_PARTS, Part, Population, Rule, Samples, check_samples, grown
from saltflat.watch import kept
from saltflat.work import PRODUCT, Callback, reporting

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator
else:
    LinearOperator = object  # SciPy's joins when the first operator is made


def trace(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    tolerance: float | None = None,
    samples: Samples = "all",
    seed: int = 0,
    certify: Certify = "proof",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Trace:
    """The trace of every parameter's block of the Hessian (or of the Gauss–Newton matrix).

    Parameters
    ----------
    model : any `torch.nn.Module`; it is measured in evaluation mode and left as it was found.
    data : a DataLoader, a pair (inputs, targets) of tensors or numpy arrays, any re-iterable of
        such pairs, or a map-style Dataset, which is read in batches of 128. All but a pair and a
        list are read once more from another random state, to see that they are the same samples.
        What worker processes read is kept in memory for the call, if it fits in 256 MiB.
    loss : a name ("cross_entropy", "mse", "bce", "normalized_cross_entropy"), a module, or any
        twice differentiable callable of outputs and targets, and of nothing else that is measured.
    curvature : "hessian" or "ggn".
    parameters : "trainable", "all" (frozen ones too) or a list of names.
    estimator : for what cannot be had exactly: `PropagatedCurvature(draws, seed)`,
        `ActivationProbes(draws, seed)` or `Hutchinson(probes, seed)`. By default that of the first
        two with the smaller variance in a pilot, and as many draws as `tolerance` takes.
    tolerance : of an estimated block the standard error is to be at most this share of its trace
        (of |Tr H| or of Tr G, whichever is larger), or a fifth of it of the Gauss–Newton trace of
        the network; by default 0.05. Draws end before that if they have cost 100 gradients, which
        the first note and a warning tell, with what it would take. If it is given, a trace that
        could be had exactly is estimated too where that is cheaper: of the directions of every
        sample the largest, those that matter and a few of the rest, or random mixes of the rest
        where there are many (200 classes and more), until the standard error of every block, and of
        their sum, is small enough. Where it is not cheaper, or another block has to be estimated
        anyway, the trace is exact; the notes tell which.
    samples : "all", or "auto" for growing random parts of the data, until `Trace.interval` reaches
        at most 2 `tolerance` of the total to either side: it holds the total on all samples with a
        probability of 95 % (`saltflat.subsample` says how, and what it cannot know). Every sample
        must have a part of its own in what is computed: what is swept for or sketched as a whole
        has it, other estimates have not. Where half of the samples are not enough, all are
        measured, as if "all" had been asked for.
    seed : of the default estimator's noise, of the directions that are chosen, and of the order in
        which samples are drawn.
    certify : "proof" takes for piecewise linear what the graph of every pass proves so; "probe"
        also takes what seems so on a few samples, which is then not called exact and has no
        standard error; "none" takes nothing, so that every block of the Hessian is estimated.
    max_directions : outputs with more directions a sample than this are sketched.
    memory_budget : bytes that a chunk of samples may take.
    dtype : compute in this dtype; half precision models are computed in float32 by default.
    unpack : callable that splits an item of the data into inputs and targets.
    output : which of what the model returns are the outputs: the name of an entry or attribute, the
        place in a tuple, or a callable that is given all; by default a tensor, or its logits.
    distributed, progress : as in `measure`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> trace = sf.trace(model, (x, y))
    >>> {name: round(value, 3) for name, value in trace.items()}
    {'weight': 0.807, 'bias': 0.437}
    >>> trace.exact, trace.details["weight"].rule
    (True, 'linear')
    >>> x, y = torch.randn(20_000, 3), torch.arange(20_000) % 2
    >>> trace = sf.trace(model, (x, y), samples="auto")
    >>> trace.certificate.samples < 5_000, trace.exact
    (True, False)
    >>> low, high = trace.interval
    >>> low < sf.trace(model, (x, y)).total < high
    True
    """
    settings = checked_settings(max_directions, memory_budget, certify, tolerance)
    names = parameters if isinstance(parameters, str) else list(parameters)
    options = {"parameters": names, "dtype": dtype, "unpack": unpack, "output": output}

    def find(data: Any, settings: Settings) -> tuple[Risk, Findings]:
        asked = _asked("trace", curvature, seed, settings, estimator=estimator)
        with _risk(distributed, asked, model, data, loss, options) as risk:
            return risk, _found(risk, "trace", curvature, estimator, settings, seed, progress)

    if check_samples(samples) == "auto":
        with reduction(distributed, "trace", samples=samples, seed=check_seed(seed)) as together:
            population = Population(data, unpack, seed, together)
        if (tight := _on_samples(population, settings, find, curvature)) is not None:
            estimate, findings = tight
            _warn(findings)
            return estimate
    risk, findings = find(data, settings)
    if estimator is None:
        _tell_shortfall(findings, "trace", settings.tolerance)
    _warn(findings)
    return Trace(**_blocks(risk, findings, "trace", curvature, float))


def diagonal(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    certify: Certify = "proof",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Diagonal:
    """The diagonal of the Hessian (or of the Gauss–Newton matrix), a tensor for every parameter.

    Arguments as in `trace`; what can be had exactly is, whatever the tolerance: an entry that few
    samples feed would have an error that does not hold.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> sf.diagonal(model, (x, y), "mse")["weight"].round(decimals=3)
    tensor([[1., 1.]], dtype=torch.float64)
    """
    settings = checked_settings(max_directions, memory_budget, certify, tolerance)
    options = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    asked = _asked("diagonal", curvature, seed, settings, estimator=estimator)
    with _risk(distributed, asked, model, data, loss, options) as risk:
        findings = _found(risk, "diagonal", curvature, estimator, settings, seed, progress)
    if estimator is None:
        _tell_shortfall(findings, "diagonal", settings.tolerance)
    _warn(findings)
    return Diagonal(**_blocks(risk, findings, "diagonal", curvature, Tensor.cpu))


def eigenvalues(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    k: int = 5,
    block: str | None = None,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    tol: float = 1e-3,
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Eigenvalues:
    """The k (algebraically) largest eigenvalues of the whole Hessian, or of one parameter's block.

    Found by Lanczos iteration on products with the matrix, copies of a multiple eigenvalue among
    them. Each comes with its unit eigenvector and with the residual norm ‖Hv − λv‖, which bounds
    the distance from λ to an eigenvalue. No iteration on products can prove that it missed none:
    that one larger than the least of them by more than `tol` was has a chance of 1e-4.

    Parameters
    ----------
    k : how many.
    block : the name of a parameter, for the eigenvalues of its block alone.
    tol : residual norms are at most this part of their eigenvalues, but for rounding, and errors of
        eigenvalues 1e-4 of its square.
    seed : of the random vector that the iteration starts from.
    Other arguments as in `trace`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
    >>> found = sf.eigenvalues(model, (x, y), k=2, tol=1e-4)
    >>> [round(value, 3) for value in found.values]
    [0.572, 0.353]
    >>> all(pair.residual < 1e-4 * pair.value for pair in found)
    True
    >>> list(sf.eigenvalues(model, (x, y), k=1, block="2.weight")[0].vector)
    ['2.weight']
    """
    settings = checked_settings(1000, memory_budget, "proof")
    options = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    asked = _asked("eigenvalues", curvature, seed, settings, k=k, block=block, tol=tol)
    with _risk(distributed, asked, model, data, loss, options) as risk:
        names = _block(risk, block)
        size = sum(risk.parameters[name].numel() for name in names)
        if check_integer("k", k) > size:
            raise InvalidValue(f"k must be at most {size}, the size of the matrix. Got {k}.")
        whole = Curvature(risk, curvature, settings=settings, seed=check_seed(seed))
        # About ten products for every pair, and ten to begin with.
        whole.foresee = partial(whole.announce, 10 * (1 + k) * PRODUCT)
        with _at_work(risk, "eigenvalues", progress):
            pairs = whole.eigenpairs(names, k, tol)
    _warn(whole)
    return Eigenvalues(tuple(Eigenvalue(*p[:3], curvature) for p in pairs), curvature, block)


def _asked(
    call: str, curvature: MatrixName, seed: int, settings: Settings, **others: object
) -> dict[str, Any]:
    """The call and its options, which must be the same in all processes."""
    return {"call": call, "curvature": curvature, "seed": seed, **settings.asked, **others}


@contextmanager
def _risk(
    distributed: bool,
    asked: dict[str, Any],
    model: nn.Module,
    data: Any,
    loss: LossLike,
    options: dict[str, Any],
) -> Iterator[Risk]:
    """The risk of this process, or of all ranks, for the length of a call."""
    with reduction(distributed, **asked) as together:
        yield Risk(model, data, loss, **options, reduction=together)


@contextmanager
def _at_work(risk: Risk, step: str, progress: bool | Callback | None) -> Iterator[None]:
    """A session of the risk, shown as one step."""
    told = progress if risk.reduction.rank == 0 else False
    with reporting(told) as risk.work, risk.session(), derivatives_explained():
        risk.work.at(step, 0, 1)
        yield


def _block(risk: Risk, block: Any) -> list[str]:
    """The parameters of one block, or all of them."""
    if block is None:
        return list(risk.parameters)
    if not isinstance(block, str):
        own = next((n for n, p in risk.parameters.items() if p is block), "fc.weight")
        got = type(block).__name__
        raise InvalidType(f"A block is chosen by name. Got a {got}; pass block={own!r}.")
    if block not in risk.parameters:
        raise InvalidValue(
            f"block must name a measured parameter. Got {block!r}. "
            f"{nearest(str(block), risk.parameters)}"
        )
    return [block]


def max_eigenvalue(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    block: str | None = None,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    tol: float = 1e-3,
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Eigenvalue:
    """The largest eigenvalue of the whole Hessian, or of the blocks in `parameters` together.

    It is the first of `eigenvalues`, whose arguments it takes.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> round(sf.max_eigenvalue(model, (x, y), "mse").value, 4)
    1.0
    """
    return eigenvalues(
        model,
        data,
        loss,
        k=1,
        block=block,
        curvature=curvature,
        parameters=parameters,
        tol=tol,
        seed=seed,
        memory_budget=memory_budget,
        dtype=dtype,
        unpack=unpack,
        output=output,
        distributed=distributed,
        progress=progress,
    )[0]


def density(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    block: str | None = None,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    probes: int = 10,
    steps: int = 60,
    width: float | None = None,
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Density:
    """The density of the eigenvalues of the Hessian, smoothed by a Gaussian kernel, with its error.

    Stochastic Lanczos quadrature (Lin, Saad and Yang 2016; Ghorbani et al. 2019): every probe is a
    random unit vector, from which `steps` products with the matrix give nodes and weights of its
    spectrum, orthogonalised in full. The mean over probes is the density, their spread its error.

    It costs probes × steps products, and memory for `steps` vectors in float64.

    Parameters
    ----------
    block : the name of a parameter, for the density of its block alone.
    probes : how many random vectors, at least two.
    steps : how many products with each. Nodes are exact for polynomials of degree 2·steps − 1.
    width : of the kernel, its standard deviation. By default the range of the nodes over `steps`:
        a polynomial of that degree follows such a kernel to a thousandth of its height, so that
        what is not in the error band is less than that.
    Other arguments as in `trace`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.randn(8, 3), torch.arange(8) % 2
    >>> density = sf.density(model, data, probes=20)
    >>> round(float(torch.trapezoid(density.density, density.grid)), 3)
    1.0
    >>> mean, error = density.moment(1)
    >>> abs(mean - sf.trace(model, data).total / density.size) < 4 * error
    True
    """
    check_integer("probes", probes, least=2)
    check_integer("steps", steps, least=2)
    if width is not None:
        check_number("width", width, above=True)
    settings = checked_settings(1000, memory_budget, "proof")
    options = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    asked = _asked("density", curvature, seed, settings, block=block, probes=probes, steps=steps)
    with _risk(distributed, asked, model, data, loss, options) as risk:
        names = _block(risk, block)
        whole = Curvature(risk, curvature, settings=settings, seed=check_seed(seed))
        whole.foresee = partial(whole.announce, probes * steps * PRODUCT)
        with _at_work(risk, "density", progress):
            rules = whole.quadratures(names, probes, steps)
    nodes, weights = zip(*rules, strict=True)
    reach = float(max(n.max() for n in nodes) - min(n.min() for n in nodes))
    scale = float(max(n.abs().max() for n in nodes))
    # All eigenvalues may be the same one.
    width = width or max(reach, 1e-6 * scale or 1.0) / steps
    size = sum(risk.parameters[name].numel() for name in names)
    return Density(nodes, weights, width, size, steps, curvature, block)


class Operator(LinearOperator):  # type: ignore[misc]
    """The Hessian (or the Gauss–Newton matrix) of a model, as a symmetric linear operator.

    `operator @ v` takes v as a mapping from parameter names to tensors, as a flat vector of all
    parameters in `named_parameters` order, or as a matrix of such columns; tensors or numpy arrays.
    The product has the form of v, and of tensors the dtype and the device. It is a SciPy
    `LinearOperator` too, for `scipy.sparse.linalg.eigsh`, `cg` and the like.

    Every product borrows the model anew and gives it back as it was found, so that it belongs to
    the parameters that the model has at that time. The columns of a matrix share one such loan.
    What the worker processes of a DataLoader read for the first product serves the others too.

    Attributes
    ----------
    names : the measured parameters, in the order of a flat vector.
    curvature : "hessian" or "ggn".

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> operator = sf.hessian(model, (x, y), "mse")
    >>> operator.shape, isinstance(operator, sf.Operator)
    ((2, 2), True)
    >>> operator @ {"weight": torch.tensor([[1.0, 2.0]])}
    {'weight': tensor([[1., 2.]])}
    """

    def __new__(cls, *_: Any) -> Operator:
        return object.__new__(_for_scipy())

    def __init__(
        self,
        risk: Callable[..., Risk],
        curvature: MatrixName,
        memory_budget: int | None,
        distributed: bool = False,
    ) -> None:
        self._risk, self.curvature, self._distributed = risk, curvature, distributed
        self._settings = checked_settings(1000, memory_budget, "proof")
        self.names = tuple(risk().parameters)
        size = sum(p.numel() for p in risk().parameters.values())
        super().__init__(np.dtype(np.float64), (size, size))

    def __matmul__(self, v: Any) -> Any:
        if isinstance(v, Mapping):
            return self._of_mapping(v)
        if isinstance(v, Tensor):
            kind = _kind(v)
            flat = v.detach().to("cpu", torch.float64).numpy()
            self._check(flat)
            return torch.from_numpy(super().__matmul__(flat)).to(v.device, kind)
        if isinstance(v, list | tuple | np.ndarray):
            v = np.asarray(v)
            self._check(v)
        return super().__matmul__(v)

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        return self._matmat(v.reshape(-1, 1))[:, 0]

    def _matmat(self, v: np.ndarray) -> np.ndarray:
        if np.iscomplexobj(v):
            raise InvalidType("Products are with real vectors. Got complex ones.")
        columns = torch.from_numpy(np.ascontiguousarray(v.T, dtype=np.float64))
        risk = self._risk()
        space = Coordinates(risk.parameters)
        if space.size != self.shape[0]:
            raise ModelError(
                f"The model has {space.size} measured parameters, and had {self.shape[0]} when the "
                "operator was made. Make another one."
            )
        images = self._images([space.split(column) for column in columns])
        return torch.stack([space.join(image).cpu() for image in images], 1).numpy()

    def _of_mapping(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        risk = self._risk()
        for name in {**dict.fromkeys(v), **risk.parameters}:
            if name not in risk.parameters:
                known = nearest(str(name), risk.parameters)
                raise InvalidValue(f"The vector has {name!r}, no measured parameter. {known}")
            wanted, got = risk.parameters[name].shape, v[name].shape if name in v else None
            if got != wanted:
                raise InvalidValue(
                    f"The vector must have {name!r} of shape {tuple(wanted)}. "
                    f"Got {'nothing' if got is None else tuple(got)}."
                )
        kinds = {name: (v[name].device, _kind(v[name])) for name in risk.parameters}
        (image,) = self._images([{name: v[name].detach() for name in kinds}])
        return {name: image[name].to(*kind) for name, kind in kinds.items()}

    def _images(self, vectors: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        call = f"a product with the {self.curvature}"
        with reduction(self._distributed, call) as together:
            if together.ranks > 1:
                sums = together.each(lambda: [[checksum(x) for x in v.values()] for v in vectors])
                if any(other != sums[0] for other in sums):
                    raise InvalidValue("The ranks multiply other vectors: all must have the same.")
            risk = self._risk(reduction=together)
            with risk.session(), derivatives_explained():
                return Curvature(risk, self.curvature, settings=self._settings).images(vectors)

    def _check(self, flat: np.ndarray) -> None:
        size = self.shape[0]
        if flat.ndim not in (1, 2) or flat.shape[0] != size:
            raise InvalidValue(
                f"A vector must have {size} entries, a matrix {size} rows. "
                f"Got shape {tuple(flat.shape)}."
            )

    def _adjoint(self) -> Operator:
        return self

    _transpose = _adjoint

    def __reduce__(self) -> Any:
        budget = self._settings.memory_budget
        return Operator, (self._risk, self.curvature, budget, self._distributed)


@cache
def _for_scipy() -> type[Operator]:
    """The class of all operators, one of SciPy's too, which is imported for them alone."""
    from scipy.sparse.linalg import LinearOperator

    return type("Operator", (Operator, LinearOperator), {"__module__": __name__})


def _kind(v: Tensor) -> torch.dtype:
    """The dtype of products with it."""
    if v.is_complex():
        raise InvalidType("Products are with real vectors. Got complex ones.")
    return v.dtype if v.is_floating_point() else torch.float64


def hessian(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    parameters: str | Iterable[str] = "trainable",
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
) -> Operator:
    """The Hessian as a linear operator: `sf.hessian(model, data) @ v`, see `Operator`.

    Arguments as in `trace`. For the Gauss–Newton matrix: `ggn`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> from scipy.sparse.linalg import eigsh
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> operator = sf.hessian(model, (x, y))
    >>> (operator @ torch.ones(8)).shape
    torch.Size([8])
    >>> top = eigsh(operator, k=1)[0].item()
    >>> abs(top - sf.max_eigenvalue(model, (x, y)).value) < 1e-4 * top
    True
    """
    options = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    return _operator("hessian", memory_budget, model, data, loss, options, distributed)


def ggn(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    parameters: str | Iterable[str] = "trainable",
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
) -> Operator:
    """The Gauss–Newton matrix as a linear operator: `sf.ggn(model, data) @ v`, see `Operator`.

    Arguments as in `trace`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> sf.ggn(model, (x, y), "mse") @ torch.tensor([1.0, 2.0])
    tensor([1., 2.])
    """
    options = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    return _operator("ggn", memory_budget, model, data, loss, options, distributed)


def _operator(
    curvature: MatrixName,
    memory_budget: int | None,
    model: nn.Module,
    data: Any,
    loss: LossLike,
    options: dict[str, Any],
    distributed: bool,
) -> Operator:
    if not isinstance(options["parameters"], str):
        options["parameters"] = list(options["parameters"])
    risk = partial(Risk, model, kept(data), loss, **options)
    return Operator(risk, curvature, memory_budget, distributed)


def _found(
    risk: Risk,
    kind: Kind,
    curvature: MatrixName,
    estimator: Estimator | None,
    settings: Settings,
    seed: int,
    progress: bool | Callback | None,
) -> Findings:
    check_estimator(estimator)
    whole = Curvature(risk, curvature, estimator, settings, check_seed(seed))
    kinds = frozenset({kind})
    whole.foresee = lambda first, plan: whole.announce(whole.price(kinds, first, plan), first, plan)
    with _at_work(risk, kind, progress):
        return whole.find(kinds)


def _tell_shortfall(findings: Findings, kind: Kind, tolerance: float) -> None:
    """Say before all else that the draws ended above the tolerance, if they did."""
    found = findings.quantities[kind]
    total = {"the total": (found.total, found.total_stderr)}
    if told := shortfall(tolerance, total, findings.shortfall, findings.probes):
        findings.warnings.insert(0, told)
        findings.notes.insert(0, told)


def _warn(found: Findings | Curvature) -> None:
    for warning in found.warnings:
        warnings.warn(warning, stacklevel=3)


def _blocks(
    risk: Risk,
    findings: Findings,
    kind: Kind,
    curvature: MatrixName,
    cast: Callable[[Tensor], Value],
) -> dict[str, Any]:
    """What a result holds."""
    quantity = findings.quantities[kind]
    return {
        "details": quantity.details(cast),
        "total": quantity.total,
        "stderr": quantity.total_stderr,
        "curvature": curvature,
        "certificate": findings.certificate,
        "frozen": risk.frozen,
        "notes": (*risk.notes, *findings.notes),
        "degrees": quantity.total_degrees,
    }


def _on_samples(
    population: Population,
    settings: Settings,
    find: Callable[[Any, Settings], tuple[Risk, Findings]],
    curvature: MatrixName,
) -> tuple[Trace, Findings] | None:
    """The trace on as many samples as it takes, and what it is made of; None if it takes all."""
    rule, on_parts = Rule(population.size, settings.tolerance), settings.on_parts()

    def look(data: Any) -> tuple[tuple[Risk, Findings, Part], list[Part]]:
        risk, findings = find(data, on_parts)
        trace = findings.quantities["trace"]
        known = trace.sampled(dict.fromkeys(trace.values, 1.0))
        if not known:
            raise NotApplicable(NO_PARTS.format("the trace"))
        part = Part(trace.total, known["sampling"], known["skewness"], trace.total_stderr)
        return (risk, findings, part), [part]

    tight = grown(population, rule, look)
    if tight is None:
        return None
    (risk, findings, part), size = tight
    fields, trace = _blocks(risk, findings, "trace", curvature, float), findings.quantities["trace"]
    used = rule.used(size)
    details = {
        name: replace(
            detail,
            exact=False,
            stderr=rule.error(trace.sampled({name: 1.0})["sampling"], detail.stderr, size),
            degrees=size - 1,
            reason=f"{used}; {detail.reason}",
        )
        for name, detail in fields["details"].items()
    }
    own = {"details": details, "notes": (*fields["notes"], used)}
    return Trace(**fields | own | rule.certainty(part, size)), findings


def checked_settings(
    max_directions: int,
    memory_budget: int | None,
    certify: Certify,
    tolerance: float | None = None,
) -> Settings:
    check_choice("certify", certify, get_args(Certify))
    check_integer("max_directions", max_directions)
    if memory_budget is not None:
        memory_budget = int(check_number("memory_budget", memory_budget, least=1))
    settings = Settings(max_directions, memory_budget, certify)
    if tolerance is None:
        return settings
    check_number("tolerance", tolerance, above=True)
    return replace(settings, tolerance=tolerance, adaptive=True)

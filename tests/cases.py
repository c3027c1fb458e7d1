"""The table of cases: small networks × data × losses, and what is known about each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any

import networks as net
import torch
import torch.nn.functional as F
from dense import Dense
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

Draw = Callable[[int, Generator], Any]


def normal(*shape: int) -> Draw:
    return lambda n, g: torch.randn(n, *shape, generator=g, dtype=torch.float64)


def classes(k: int, *shape: int) -> Draw:
    return lambda n, g: torch.randint(k, (n, *shape), generator=g)


def bits(*shape: int) -> Draw:
    return lambda n, g: torch.randint(2, (n, *shape), generator=g).double()


def probabilities(k: int, *shape: int) -> Draw:
    return lambda n, g: normal(k, *shape)(n, g).softmax(1)


def some_ignored(k: int, *shape: int) -> Draw:
    """Classes with every third label replaced by -100."""

    def draw(n: int, g: Generator) -> Tensor:
        y = classes(k, *shape)(n, g)
        y.view(-1)[::3] = -100
        return y

    return draw


def pair(a: Draw, b: Draw) -> Draw:
    return lambda n, g: (a(n, g), b(n, g))


def named(**draws: Draw) -> Draw:
    return lambda n, g: {key: draw(n, g) for key, draw in draws.items()}


def mask(t: int) -> Draw:
    return lambda n, g: (torch.arange(t) <= torch.randint(1, t, (n, 1), generator=g)).long()


VECTORS, LABELS = normal(4), classes(3)
REALS, BITS = normal(3), bits(3)


def scrambled(model: nn.Module, x: Any) -> nn.Module:
    """Move every parameter and statistic off its neat initial value; lazy layers get shapes."""
    model = model.double().eval()
    with torch.no_grad():
        net_call(model, x)
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.normal_()
            if name.endswith("running_var"):
                b.uniform_(0.5, 2)
    return model.train()


def net_call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating tensors in a value, in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(v, dtype) for v in value)
    return copy.deepcopy(value).to(dtype) if isinstance(value, nn.Module) else value


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module] = net.mlp
    inputs: Draw = VECTORS
    targets: Draw = LABELS
    loss: Any = "cross_entropy"
    _: KW_ONLY
    n: int = 5
    #: blocks (glob patterns) in which the outputs bend, so that the Hessian is not the GGN
    curved: tuple[str, ...] = ()
    #: blocks that nobody can prove linear, though they are
    unproved: tuple[str, ...] = ()
    #: blocks without any effect, where the certificate may say either
    dead: tuple[str, ...] = ()
    #: False: no mean or sum over samples; None: right either way, as estimate or as exact value
    separable: bool | None = True
    #: which rule must serve which block (glob pattern -> name), where it is a promise
    rules: Mapping[str, str] = field(default_factory=dict)
    #: what the oracle differentiates where it cannot be the same object
    twin: Callable[[], nn.Module] | None = None
    dense_loss: Any = None

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def model(self, dtype: torch.dtype = torch.float64, *, twin: bool = False) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build = self.twin if twin and self.twin else self.build
            return scrambled(build(), self.data()[0]).to(dtype)

    def data(self, dtype: torch.dtype = torch.float64, n: int | None = None) -> tuple[Any, Any]:
        g = torch.Generator().manual_seed(1)
        n = self.n if n is None else n
        return cast(self.inputs(n, g), dtype), cast(self.targets(n, g), dtype)

    @cache  # noqa: B019 - the cases are constants
    def dense(self, dtype: torch.dtype = torch.float64) -> Dense:
        """The oracle in float64, on weights and data that were rounded to `dtype`."""
        model = self.model(dtype, twin=True).double()
        loss = cast(self.dense_loss or self.loss, torch.float64)
        x, y = cast(self.data(dtype), torch.float64)
        return Dense(model, x, y, loss)

    def certified(self, name: str) -> bool | None:
        """Whether this block must be exact; None where either is right."""
        if any(fnmatch(name, p) for p in self.dead):
            return None
        if any(fnmatch(name, p) for p in (*self.curved, *self.unproved)):
            return False
        return self.separable

    __hash__ = object.__hash__


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def class_last(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sine(outputs: Tensor, targets: Tensor) -> Tensor:
    """Twice differentiable, a mean over samples, and its Hessian has both signs."""
    return (outputs.sin() * F.one_hot(targets, 3) + outputs.prod(1, keepdim=True)).sum(1).mean()


def divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divides by the sum of the weights: a mean, but not over samples."""
    return F.cross_entropy(outputs, targets, WEIGHTS.to(outputs))


def over_root_n(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum") / len(targets) ** 0.5


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    p, t = outputs.softmax(1), F.one_hot(targets, 3)
    return 1 - ((2 * (p * t).sum(0) + 1) / ((p + t).sum(0) + 1)).mean()


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z), device=z.device).roll(1))


def conv(name: str, layer: Callable[[], nn.Module], *size: int, rule: str = "conv") -> Case:
    return Case(name, lambda: net.classify(layer()), normal(*size), rules={"0.*": rule})


def norm(name: str, before: nn.Module, layer: nn.Module, *size: int, bends: bool = True) -> Case:
    """A layer, a normalisation of it and a head: statistics of the sample bend what is before."""

    def build() -> nn.Module:
        model = copy.deepcopy(net.classify(before, layer))
        model[0].reset_parameters()  # by the seed of the case, not by that of the import
        return model

    return Case(
        name,
        build,
        normal(*size),
        curved=("0.*",) if bends else (),
        # the mean of a channel is taken out again, and a constant with it
        dead=("0.bias",) if isinstance(layer, nn.InstanceNorm1d | nn.InstanceNorm2d) else (),
        rules={"1.*": "norm"},
    )


LINEAR = {"*": "linear"}
CONVOLUTIONS = [
    conv("conv1d", lambda: nn.Conv1d(2, 3, 3), 2, 6),
    conv("conv1d stride dilation", lambda: nn.Conv1d(2, 3, 2, stride=2, dilation=2), 2, 7),
    conv("conv2d padding", lambda: nn.Conv2d(2, 3, 3, padding=1), 2, 4, 4),
    conv("conv2d stride uneven", lambda: nn.Conv2d(2, 2, 3, stride=2, padding=(1, 0)), 2, 6, 5),
    conv("conv2d oblong", lambda: nn.Conv2d(2, 2, (3, 1), stride=(1, 2), bias=False), 2, 4, 5),
    conv("conv2d same", lambda: nn.Conv2d(2, 2, (2, 3), padding="same"), 2, 4, 3),
    conv("conv2d valid", lambda: nn.Conv2d(2, 2, 2, padding="valid"), 2, 3, 3),
    conv("conv2d dilated", lambda: nn.Conv2d(2, 2, 2, dilation=2, padding=1), 2, 4, 4),
    conv("conv2d groups", lambda: nn.Conv2d(4, 4, 2, groups=2), 4, 3, 3),
    conv("conv2d depthwise", lambda: nn.Conv2d(3, 6, 2, groups=3, padding=1), 3, 2, 2),
    conv("conv2d pointwise", lambda: nn.Conv2d(3, 2, 1), 3, 2, 2),
    conv(
        "conv2d circular", lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 2, 3, 3
    ),
    conv("conv2d reflect", lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 2, 3, 3),
    conv(
        "conv1d same circular",
        lambda: nn.Conv1d(2, 2, 4, padding="same", padding_mode="circular", dilation=1),
        2,
        5,
    ),
    conv("conv3d", lambda: nn.Conv3d(1, 2, 2, padding=(0, 1, 0), stride=(1, 2, 1)), 1, 3, 2, 3),
    conv("conv3d depthwise", lambda: nn.Conv3d(2, 2, 2, groups=2), 2, 2, 3, 2),
]
TRANSPOSED = [
    conv(name, layer, *size, rule="conv_transpose")
    for name, layer, *size in [
        ("transposed 1d", lambda: nn.ConvTranspose1d(2, 3, 3), 2, 3),
        (
            "transposed 1d output padding",
            lambda: nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1, output_padding=1, dilation=2),
            2,
            3,
        ),
        (
            "transposed 2d groups",
            lambda: nn.ConvTranspose2d(4, 2, (2, 3), stride=2, groups=2, output_padding=(1, 0)),
            4,
            2,
            2,
        ),
        ("transposed 2d", lambda: nn.ConvTranspose2d(2, 2, 3, padding=1, bias=False), 2, 3, 3),
        ("transposed 3d", lambda: nn.ConvTranspose3d(1, 2, 2, stride=(2, 1, 1)), 1, 2, 2, 1),
    ]
]
NORMALISATIONS = [
    norm("batch norm 1d", nn.Linear(4, 5), nn.BatchNorm1d(5), 4, bends=False),
    norm("batch norm 1d on sequences", nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), 2, 4, bends=False),
    norm("batch norm 2d", nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), 2, 3, 3, bends=False),
    norm("batch norm 3d", nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), 1, 3, 2, 2, bends=False),
    norm("layer norm", nn.Linear(4, 5), nn.LayerNorm(5), 4),
    norm("layer norm without bias", nn.Linear(4, 5), nn.LayerNorm(5, bias=False), 4),
    norm("layer norm of images", nn.Conv2d(2, 2, 2), nn.LayerNorm((2, 2, 2)), 2, 3, 3),
    norm("group norm", nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), 2, 3, 3),
    norm("instance norm 1d", nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), 2, 4),
    norm("instance norm 2d", nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), 2, 3, 3),
    norm("rms norm", nn.Linear(4, 5), nn.RMSNorm(5), 4),
]
ACTIVATIONS = [
    Case(f"mlp {act().__class__.__name__}", partial(net.mlp, act), rules={"2.*": "linear"})
    for act in (nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.ReLU6, nn.Softshrink, nn.Identity)
]
BENDS = [
    Case(f"mlp {act().__class__.__name__}", partial(net.mlp, act), curved=("0.*",))
    for act in (nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU)
]
WEIGHT_NORM, SPECTRAL = parametrizations.weight_norm, parametrizations.spectral_norm
GRAPHS = [
    Case("mlp", rules=LINEAR),
    Case("mlp without bias", lambda: net.mlp(bias=False), rules=LINEAR),
    Case("linear alone", lambda: nn.Linear(4, 3), rules=LINEAR),
    Case("one sample", n=1, rules=LINEAR),
    Case("two classes", lambda: net.mlp(k=2), targets=classes(2), rules=LINEAR),
    Case("one class", lambda: net.mlp(k=1), targets=classes(1)),
    Case("maxout", net.maxout),
    Case("dropout", lambda: net.seq(nn.Dropout(0.5), net.mlp(), nn.Dropout(0.5))),
    Case("in-place relu", lambda: net.mlp(lambda: nn.ReLU(inplace=True))),
    Case("in-place relu after conv", net.in_place_conv, normal(2, 3, 3)),
    Case("residual", net.Residual, normal(2, 3, 3), rules={"conv?.*": "conv", "bn?.*": "norm"}),
    Case("residual in place", lambda: net.Residual(in_place=True), normal(2, 3, 3)),
    Case("branches", net.Branches, normal(2, 4, 4)),
    Case("siamese", net.Siamese),
    Case("module called in a chain", lambda: net.Siamese(chain=True), curved=("body.weight",)),
    Case("tied weights", net.TiedWeights),
    Case("tied decoder", net.TiedDecoder, classes(6, 2), classes(6), curved=("embed.*",)),
    Case("embedding", net.TokenSum, classes(6, 3), rules={"embed.*": "embedding"}),
    Case("places", net.Places, classes(6, 3), rules={"place.*": "embedding"}),
    Case(
        "places twice",
        lambda: net.Places(twice=True),
        classes(6, 3),
        rules={"place.*": "per-sample", "embed.*": "embedding"},
    ),
    Case("one place", net.OnePlace, classes(6, 3), rules={"place.*": "per-sample"}),
    Case(
        "one sample with residuals",
        net.Stream,
        classes(6, 3),
        n=1,
        curved=("fc1.weight",),
        rules={"embed.*": "embedding"},
    ),
    Case("embedding padding", lambda: net.TokenSum(padding_idx=0), classes(6, 3)),
    Case(
        "embedding sparse",
        lambda: net.TokenSum(sparse=True),
        classes(6, 3),
        twin=net.TokenSum,
    ),
    Case(
        "sequences",
        net.Tokens,
        classes(6, 2),
        classes(3, 2),
        n=4,
        rules={"fc?.*": "linear"},
        dense_loss=class_last,
    ),
    Case("linear on five axes", lambda: net.classify(nn.Linear(2, 3)), normal(2, 1, 2, 2)),
    Case("segmentation", net.Pixels, normal(2, 2, 4), classes(3, 2, 4), n=3),
    Case("unet", net.UNet, normal(2, 4, 4), classes(2, 4, 4), n=3),
    Case("time first", net.TimeFirst, normal(2, 3), curved=("fc1.*",)),
    Case("time first square", net.TimeFirst, normal(5, 3), curved=("fc1.*",)),
    Case("time first merged", lambda: net.TimeFirst(merge=True), normal(2, 3), curved=("fc1.*",)),
    Case("windows", net.Windows, normal(6)),
    Case("hugging face conv1d", net.hugging_face_conv1d, normal(2, 4), rules=LINEAR),
    Case("raw parameters", net.Raw, normal(3, 4), rules={"mix": "per-sample"}),
    Case("matmul", net.MatMul),
    Case("weight used functionally", net.Functional),
    Case("weight kept in a list", lambda: net.Functional(captured=True)),
    Case(
        "attention",
        net.Attention,
        normal(3, 4),
        curved=("attention.in_proj_*",),
        rules={"attention.out_proj.*": "linear"},
    ),
    Case(
        "transformer",
        net.Transformer,
        normal(3, 4),
        curved=("layer.self_attn.*", "layer.linear?.*", "layer.norm1.*"),
    ),
    Case(
        "rnn relu",
        lambda: net.Recurrent(nonlinearity="relu"),
        normal(4, 2),
        curved=("cell.weight_hh_l0",),
    ),
    Case("rnn tanh", net.Recurrent, normal(3, 2), curved=("cell.*",)),
    Case("lstm", lambda: net.Recurrent(nn.LSTM), normal(3, 2), curved=("cell.*",)),
    Case("gru", lambda: net.Recurrent(nn.GRU), normal(3, 2), curved=("cell.*",)),
    Case("bilinear gate", net.Gate, rules=LINEAR),
    Case("bilinear layer", lambda: nn.Bilinear(4, 2, 3), pair(normal(4), normal(2))),
    Case(
        "weight norm",
        lambda: net.mlp(wrap=WEIGHT_NORM),
        curved=("*.original1",),
        twin=lambda: net.mlp(wrap=net.plain_weight_norm),
    ),
    Case("spectral norm", lambda: net.mlp(wrap=SPECTRAL), curved=("*.original",)),
    Case("spectral norm, old style", lambda: net.mlp(wrap=spectral_norm), curved=("*_orig",)),
    Case("pruned", net.pruned),
    Case("low rank adapter", net.Adapter),
    Case("checkpointed", net.Checkpointed),
    Case("user's own function", net.OwnFunction, unproved=("scale", "fc1.*")),
    Case("fourier", net.Fourier),
    Case("hard mixture of experts", net.Experts, n=7),
    Case("sorted inside", net.Sorted, n=6),
    Case("user's forward hooks", net.hooked),
    Case("user's gradient hook", net.gradient_hook, twin=net.mlp),
    Case("frozen", lambda: net.frozen("0.weight", "2.bias"), rules=LINEAR),
    Case("tuple of inputs", net.TwoInputs, pair(normal(4), normal(2))),
    Case("dict of inputs", net.TwoInputs, named(b=normal(2), a=normal(4))),
    Case("dict of outputs", net.Wrapped),
    Case(
        "bert",
        net.bert,
        named(input_ids=classes(7, 4), attention_mask=mask(4)),
        n=3,
        curved=("bert.[!p]*", "bert.pooler.*"),
        dead=("*.key.bias",),
    ),
    Case(
        "gpt2",
        net.gpt2,
        named(input_ids=classes(6, 3), attention_mask=mask(3)),
        n=3,
        curved=("transformer.[!l]*",),
        rules={"score.weight": "linear"},
    ),
    Case(
        "gpt2 language model",
        lambda: net.gpt2("GPT2LMHeadModel"),
        named(input_ids=classes(6, 3)),
        classes(6, 3),
        n=2,
        curved=("transformer.[!l]*",),
        dense_loss=class_last,
    ),
]
NETWORKS = [*GRAPHS, *CONVOLUTIONS, *TRANSPOSED, *NORMALISATIONS, *ACTIVATIONS, *BENDS]


def cross_entropy(name: str, targets: Draw = LABELS, **options: Any) -> Case:
    return Case(f"cross entropy {name}", targets=targets, loss=nn.CrossEntropyLoss(**options), n=6)


LOSSES = [
    cross_entropy("sum", reduction="sum"),
    cross_entropy("weights", weight=WEIGHTS),
    cross_entropy("weights sum", weight=WEIGHTS, reduction="sum"),
    cross_entropy("smoothing", label_smoothing=0.2),
    cross_entropy("weights smoothing", weight=WEIGHTS, label_smoothing=0.2),
    cross_entropy("ignored", some_ignored(3)),
    cross_entropy("another index ignored", ignore_index=1),
    cross_entropy("everything", some_ignored(3), weight=WEIGHTS, label_smoothing=0.1),
    cross_entropy("soft", probabilities(3)),
    cross_entropy("soft weights", probabilities(3), weight=WEIGHTS),
    cross_entropy(
        "soft weights smoothing sum",
        probabilities(3),
        weight=WEIGHTS,
        label_smoothing=0.3,
        reduction="sum",
    ),
    Case("cross entropy function", loss=F.cross_entropy),
    Case("mse", targets=REALS, loss="mse"),
    Case("mse module", targets=REALS, loss=nn.MSELoss()),
    Case("mse sum", targets=REALS, loss=nn.MSELoss(reduction="sum")),
    Case("mse of one number", lambda: net.mlp(k=1), targets=normal(1), loss="mse"),
    Case("mse of no axis", net.Squeezed, targets=normal(), loss="mse"),
    Case("mse of images", net.Pixels, normal(2, 2, 4), normal(3, 2, 4), loss="mse", n=2),
    Case("bce", targets=BITS, loss="bce"),
    Case("bce of no axis", net.Squeezed, targets=bits(), loss="bce"),
    Case("bce pos weight", targets=BITS, loss=nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    Case("bce weight sum", targets=BITS, loss=nn.BCEWithLogitsLoss(WEIGHTS, reduction="sum")),
    Case("normalized cross entropy", loss="normalized_cross_entropy"),
    Case(
        "normalized cross entropy of pixels",
        net.Pixels,
        normal(2, 2, 2),
        classes(3, 2, 2),
        "normalized_cross_entropy",
        n=3,
    ),
    Case("indefinite", loss=sine),
    Case("huber", targets=REALS, loss=nn.HuberLoss(delta=0.5)),
    Case("poisson", targets=BITS, loss=nn.PoissonNLLLoss()),
    Case("divergence", targets=probabilities(3), loss=divergence),
    Case("nll", net.log_softmax_mlp, loss=nn.NLLLoss(), dense_loss=F.cross_entropy),
    Case(
        "bce of probabilities",
        net.probabilities_mlp,
        targets=BITS,
        loss=nn.BCELoss(),
        curved=("*",),
    ),
    Case("class last", net.Tokens, classes(6, 2), classes(3, 2), loss=class_last, n=3),
    Case(
        "segmentation weights ignored",
        net.Pixels,
        normal(2, 2, 4),
        some_ignored(3, 2, 4),
        nn.CrossEntropyLoss(WEIGHTS),
        n=3,
    ),
    Case(
        "segmentation sum",
        net.Pixels,
        normal(2, 2, 2),
        classes(3, 2, 2),
        nn.CrossEntropyLoss(reduction="sum"),
        n=3,
    ),
    Case(
        "segmentation soft",
        net.Pixels,
        normal(2, 2, 2),
        probabilities(3, 2, 2),
        nn.CrossEntropyLoss(),
        n=3,
    ),
    # means over something other than samples: right, whether found separable or not
    Case("weighted mean function", loss=weighted, separable=None),
    Case(
        "weighted nll",
        net.log_softmax_mlp,
        loss=nn.NLLLoss(WEIGHTS),
        dense_loss=nn.CrossEntropyLoss(WEIGHTS),
    ),
    Case("sum over root n", loss=over_root_n, separable=None),
]


NON_SEPARABLE = [
    Case("dice", loss=dice, separable=False),
    Case("contrastive", loss=contrastive, separable=False),
    Case("log of mean", loss=lambda o, y: F.cross_entropy(o, y).log(), separable=False),
    Case("variance", loss=lambda o, y: F.cross_entropy(o, y) + o.var(0).sum(), separable=False),
]
CASES = [*NETWORKS, *LOSSES, *NON_SEPARABLE]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)

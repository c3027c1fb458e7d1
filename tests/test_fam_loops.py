"""FAM beside the contract of all optimizers and penalties: precision, copies, hooks, errors."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import Dense
from fam_cases import LABELS, WEIGHTED, K, N, batch_dice, kappa, make, penalty
from papers import layers, relative_flatness
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import saltflat as sf
from saltflat.training.fam import FAM


def test_outputs_with_logits() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("relu")[0]

        def forward(self, *, inputs: Tensor) -> dict[str, Tensor]:
            return {"hidden": inputs, "logits": self.inner(inputs)}

    model, x = Named(), make("relu")[1]
    with FAM(model, "inner.4", 1.0) as fam:
        model(inputs=x)
        assert fam(LABELS).item() == pytest.approx(penalty(model.inner, x, LABELS, "4"), rel=1e-12)


@pytest.mark.parametrize("loss", ["cross_entropy", batch_dice])
def test_overflow_is_not_an_error(loss: Any) -> None:
    """A GradScaler finds the NaN in the gradients and skips the step."""
    model, x = make("smooth")
    x[0] = torch.inf
    for layer in ("0", "2", "4"):
        assert np.isnan(penalty(model, x, LABELS, layer, loss=loss))


def test_layers_add_up() -> None:
    model, x = make("smooth")
    parts = [penalty(model, x, LABELS, layer) for layer in ("4", "0")]
    with FAM(model, ["4", "0"], 2.0) as fam:
        model(x)
        assert fam(LABELS).item() == pytest.approx(2 * sum(parts), rel=1e-12)
        assert [float(p.value) for p in fam.last.values()] == pytest.approx(parts, rel=1e-12)
        assert fam.layers == tuple(fam.last) == ("4", "0")
        assert not any(p.value.requires_grad for p in fam.last.values())


@pytest.mark.parametrize("layer", ["2", "4"])
def test_autocast(layer: str) -> None:
    model, x = make("relu")
    model, x = model.float(), x.float()
    want = penalty(model, x, LABELS, layer)
    with FAM(model, layer, 1.0) as fam, torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
        value = fam(LABELS)
    assert outputs.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(want, rel=0.05)
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("size", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_share_is_a_bound_that_is_reached_where_the_penalty_is_large(
    size: float, share: float
) -> None:
    """Against the penalty at strength 1 and the loss; the factor takes no part in the gradient."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, K)).double(), torch.randn(N, 4, dtype=torch.float64)
    x[:, 2:] = 0  # so that these columns of the weight count in the penalty alone
    with torch.no_grad():
        model[0].weight[:, :2] *= min(size, 1)
        model[0].weight[:, 2:] *= size
    weights = list(model.parameters())
    with FAM(model, "0", 1.0) as fam:
        loss = F.cross_entropy(model(x), LABELS)
        full = fam(LABELS)
        plain = torch.autograd.grad(full, weights)
    factor = (share / (1 - share) * loss / (loss + full)).item()
    with FAM(model, "0", share=share) as fam:
        model(x)
        penalty = fam(LABELS)
        gradients = torch.autograd.grad(penalty, weights)
        assert penalty.item() == pytest.approx(factor * full.item(), rel=1e-10)
        for own, other in zip(gradients, plain, strict=True):
            assert torch.allclose(own, factor * other, rtol=1e-10, atol=1e-12)
        part = (penalty / (penalty + loss)).item()
        assert fam.current_share == pytest.approx(part, rel=1e-10)
        assert fam.current_strength == pytest.approx(factor, rel=1e-10)
        assert part < share
        assert (part > 0.9 * share) == (size > 1)
        assert f"share={share:g}; {part:.2g} of the objective" in repr(fam)


def test_strength_or_share() -> None:
    model, x = make("relu")
    with FAM(model, "2", 0.3) as fam:
        assert (fam.strength, fam.share) == (0.3, None)
        assert math.isnan(fam.current_share)
        loss = F.cross_entropy(model(x), LABELS).item()
        penalty = fam(LABELS).item()
        assert fam.current_strength == 0.3
        assert fam.current_share == pytest.approx(penalty / (penalty + loss))
        fam.share = 0.1
        assert (fam.strength, fam.share) == (None, 0.1)
        for copied in (copy.deepcopy(fam), pickle.loads(pickle.dumps(fam))):
            assert (copied.strength, copied.share) == (None, 0.1)
        state = fam.state_dict()
        fam.strength = 0.0
        model(x)
        assert fam(LABELS).item() == fam.current_share == fam.current_strength == 0.0
        fam.load_state_dict(state)
        assert (fam.strength, fam.share) == (None, 0.1)


def test_a_penalty_that_is_zero_has_no_share() -> None:
    model, x = make("relu")
    with torch.no_grad():
        model[2].weight.zero_()
    with FAM(model, "2") as fam:
        model(x)
        fam(LABELS).backward()
        assert fam.current_share == 0.0
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_data_that_are_fit_to_the_last_digit() -> None:
    """Loss and penalty are 0, and so is what is added: not 0/0, which would end the training."""
    model, x = make("relu")
    with torch.no_grad():
        model[2].weight *= 1e8
    labels = model(x).argmax(1)
    with FAM(model, "2", share=0.05) as fam:
        loss = F.cross_entropy(model(x), labels)
        penalty = fam(labels)
        (loss + penalty).backward()
        assert loss.item() == penalty.item() == fam.current_share == 0.0
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["compile first", "FAM first"])
def test_compiled(order: str) -> None:
    torch._dynamo.reset()
    model, x = make("smooth")
    want = penalty(model, x, LABELS, "2")
    if order == "compile first":
        compiled = torch.compile(model, backend="eager")
        fam = FAM(compiled, "2", 1.0)
    else:
        fam = FAM(model, "2", 1.0)
        compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
    fam.remove()


@pytest.mark.filterwarnings("ignore")
def test_compiled_before_the_hooks_came() -> None:
    torch._dynamo.reset()
    model, x = make("smooth")
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with FAM(compiled, "2", 1.0) as fam:
        compiled(x)
        with pytest.raises(sf.ModelError, match=r"torch.compiler.reset\(\) after making FAM"):
            fam(LABELS)
        torch.compiler.reset()
        compiled(x)
        assert fam(LABELS) != 0
        with pytest.raises(
            sf.ModelError, match=r"already used. Call fam\(targets\) once.*gradients.$"
        ):
            fam(LABELS)  # no word of compiling


@pytest.mark.filterwarnings("ignore")
def test_compiled_without_second_derivatives() -> None:
    torch._dynamo.reset()
    model, x = Odd("plain").double(), make("relu")[1]
    want = penalty(model, x, LABELS, "b")
    compiled = torch.compile(model, backend="aot_eager")
    with FAM(compiled, "b", 1.0) as fam:
        compiled(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
    torch.compiler.reset()
    with FAM(compiled, "a", 1.0) as fam:
        compiled(x)
        with pytest.raises(sf.ModelError, match="compiled to a kernel without second derivatives"):
            fam(LABELS)


def test_checkpointing_does_not_count_as_a_pass() -> None:
    model, x = make("smooth")
    want = penalty(model, x, LABELS, "2")

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.inner[:3], x, use_reentrant=False)
            return self.inner[3:](h)

    wrapped = Checkpointed()
    with FAM(wrapped, "inner.4", 1.0) as fam:
        (F.cross_entropy(wrapped(x), LABELS) + fam(LABELS)).backward()
        with pytest.raises(sf.ModelError, match="already used"):
            fam(LABELS)
    with FAM(wrapped, "inner.2", 1.0) as fam:
        o = wrapped(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)
        F.cross_entropy(o, LABELS).backward()
        with pytest.raises(sf.ModelError, match="already used"):
            fam(LABELS)


def test_parametrized_weights() -> None:
    model, x = make("relu")
    spectral_norm(model[2])
    weight_norm(model[4])
    model.train()
    with FAM(model, ["2", "4"], 1.0) as fam:
        model(x)
        vector = model[2].parametrizations.weight[0]._u.clone()
        fam(LABELS).backward()
        assert torch.equal(vector, model[2].parametrizations.weight[0]._u)
        values = {name: float(p.value) for name, p in fam.last.items()}
    model.eval()
    for name, layer in (("2", model[2]), ("4", model[4])):
        plain = copy.deepcopy(model)
        with torch.no_grad():
            fixed = nn.Linear(*reversed(layer.weight.shape)).double()
            fixed.weight.copy_(layer.weight)
            fixed.bias.copy_(layer.bias)
        plain[int(name)] = fixed
        want = kappa(plain, x, LABELS, "cross_entropy", name)
        assert values[name] == pytest.approx(want, rel=1e-10)
    assert model[2].parametrizations.training is False


# The life of the hooks


def test_which_forward_pass() -> None:
    model, x = make("relu")
    fam = FAM(model, "2", 1.0)
    with pytest.raises(sf.ModelError, match="There was no forward pass since FAM was made"):
        fam(LABELS)
    with torch.no_grad():
        model(x)
    with pytest.raises(sf.ModelError, match="ran without gradients"):
        fam(LABELS)
    model(x)
    with torch.no_grad():
        model(x[:2])  # an evaluation in between does not matter
    value = fam(LABELS)
    assert value.requires_grad
    with pytest.raises(sf.ModelError, match="already used"):
        fam(LABELS)
    model(x)
    with torch.no_grad():
        again = fam(LABELS)
    assert not again.requires_grad
    assert again.item() == value.item()
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    model(x)
    assert fam(LABELS).item() == value.item()
    fam.remove()
    model(x)
    with pytest.raises(sf.ModelError, match="hooks were removed"):
        fam(LABELS)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_come_off() -> None:
    model, x = make("relu")
    with FAM(model, ["0", "2"]):
        assert hooks(model) == 4
    assert hooks(model) == 0
    fam = FAM(model, "2")
    model(x)
    del fam
    gc.collect()
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), FAM(model, "2"):
        raise ZeroDivisionError
    assert hooks(model) == 0


def test_activations_are_freed() -> None:
    model, x = make("relu")
    kept: list[weakref.ref[Tensor]] = []
    model[3].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    with FAM(model, "4") as fam:
        model(x)
        assert kept[0]() is not None
        fam(LABELS)
        gc.collect()
        assert kept[0]() is None


def test_copies_of_the_model() -> None:
    model, x = make("relu")
    with FAM(model, "2", 1.0) as fam:
        o = model(x)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ]
        for other in copies:
            assert torch.allclose(other(x[:2]), o[:2])  # and does not count as a pass of the model
            assert other.state_dict().keys() == model.state_dict().keys()
        value = fam(LABELS).item()
    assert value == pytest.approx(kappa(model, x, LABELS, "cross_entropy", "2"), rel=1e-10)


def test_copies_of_fam() -> None:
    model, x = make("relu")
    with FAM(model, "2", 0.7, simplified=True, loss=WEIGHTED) as fam:
        model(x)
        value = fam(LABELS).item()
        for other in (copy.deepcopy(fam), pickle.loads(pickle.dumps(fam))):
            # The last call is not copied, whose share is told after the semicolon.
            assert repr(other) == repr(fam).partition(";")[0] + ")"
            assert other.model is not model
            other.model(x)
            assert other(LABELS).item() == value
        one, two = copy.deepcopy((model, fam))
        assert two.model is one


def test_default_layer_is_said_aloud() -> None:
    model, _ = make("conv")
    with pytest.warns(UserWarning, match="FAM regularizes '6', the last Linear layer"):
        fam = FAM(model)
    assert fam.layers == ("6",)
    assert repr(fam) == "FAM(relative flatness of '6', share=0.05)"
    fam.remove()
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    with pytest.warns(UserWarning, match="'linear2'"), FAM(encoder):
        pass  # not self_attn.out_proj, which attention never calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FAM(model, "6").remove()


# Errors


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        ("fc9", ValueError, "Got 'fc9'; nearest is 'fc1'."),
        ("act", ValueError, "must name a Linear or Conv layer of the model. Got 'act'"),
        (["fc1", "fc"], ValueError, "Got 'fc'; nearest is 'fc1'"),
        ([], ValueError, "empty list"),
        (3, TypeError, "must be a name or a list of names. Got int"),
    ],
)
def test_bad_layers(layer: Any, error: type[Exception], words: str) -> None:
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(2, 2))
    model.add_module("act", nn.ReLU())
    with pytest.raises(error, match=words) as caught:
        FAM(model, layer)
    assert isinstance(caught.value, sf.SaltflatError)
    assert hooks(model) == 0


def test_bad_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module. Got int"):
        FAM(3, "fc")
    with pytest.raises(ValueError, match="no Linear layer"):
        FAM(nn.Conv1d(1, 1, 1))
    for strength in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            FAM(model, "", strength)
    for share, words in ((1.0, "below 1"), (-0.1, "not negative"), (float("nan"), "finite")):
        with pytest.raises(ValueError, match=words):
            FAM(model, "", share=share)
    with pytest.raises(ValueError, match=r"a strength or a share. Got strength=0.1 and share=0.2"):
        FAM(model, "", 0.1, share=0.2)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="strength must be a number"):
            FAM(model, "", wrong)
    with pytest.raises(TypeError, match=r"must be saltflat.Hutchinson or None. Got str"):
        FAM(model, "", estimator="hutchinson")
    with pytest.raises(ValueError, match="Unknown loss"):
        FAM(model, "", loss="crossentropy")
    assert hooks(model) == 0


class Odd(nn.Module):
    """Ways to use a layer that FAM must notice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(4, 4), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Any:
        if self.how == "in place":
            x = x * 1.0
        h = self.a(x)
        if self.how == "twice":
            h = self.a(h.relu())
        elif self.how == "in place":
            x += 1
        elif self.how == "coupled":
            h = h - h.mean(0)
        elif self.how == "unused":
            h = x
        elif self.how == "scalar":
            return h.sum()
        elif self.how == "list":
            return [self.b(h)]
        return self.b(h.relu())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", "'a' ran 2 times in the forward pass"),
        ("coupled", "must not interact in the layers above"),
        ("unused", "The outputs do not depend on layer 'a'"),
        ("scalar", "a floating point tensor with a row for each sample"),
        ("list", "neither a tensor nor has logits"),
        ("in place", "was changed in place"),
    ],
)
def test_odd_models(how: str, words: str) -> None:
    model, x = Odd(how), torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    with FAM(model, "a") as fam:
        model(x)
        with pytest.raises(sf.ModelError, match=words):
            fam(LABELS)
    with FAM(model, "a", output=lambda out: out[0]) as fam:
        if how == "list":
            model(x)
            assert fam(LABELS) > 0


def test_a_layer_that_never_ran() -> None:
    model = nn.MultiheadAttention(4, 2)
    with FAM(model, "out_proj", output=lambda out: out[0].mean(0)) as fam:
        model(*[torch.randn(2, N, 4)] * 3)
        with pytest.raises(sf.ModelError, match="'out_proj' ran 0 times"):
            fam(LABELS)


def test_a_layer_that_is_not_linear() -> None:
    model, x = make("relu")
    model[2].register_forward_hook(lambda m, a, out: out + 1)
    with FAM(model, "2"), pytest.raises(sf.ModelError, match="does not compute W x"):
        model(x)


def test_unbatched_rows() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, K)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x.mean(0))] * len(x))

    model = Rows()
    with FAM(model, "a") as fam:
        model(torch.ones(N, 4))
        with pytest.raises(sf.ModelError, match="cannot tell which rows"):
            fam(LABELS)


def test_frozen_layers() -> None:
    model, x = make("relu")
    model[:3].requires_grad_(False)
    with FAM(model, "2") as fam:
        model(x)
        with pytest.raises(sf.ModelError, match="'2' and all below it are frozen"):
            fam(LABELS)
    assert penalty(model, x, LABELS, "4") > 0
    model.requires_grad_(True)
    want = penalty(model, x, LABELS, "2")
    model[2].requires_grad_(False)  # what it says still depends on the layers around it
    assert penalty(model, x, LABELS, "2") == want


def test_fused_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)).double()
    x = torch.randn(5, N, 4, generator=torch.Generator().manual_seed(0)).double()

    def last(out: Tensor) -> Tensor:
        return out[-1, :, :K]

    with FAM(model, "0", output=last) as fam:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(x)
        with pytest.raises(sf.ModelError, match="Fused attention above the layer"):
            fam(LABELS)
    dense = Dense(model, x, LABELS, names=["0.weight"], output=last)
    want = relative_flatness(layers(dense)["0"])
    with FAM(model, "0", 1.0, output=last) as fam, sdpa_kernel(SDPBackend.MATH):
        model(x)
        assert fam(LABELS).item() == pytest.approx(want, rel=1e-10)


def test_bad_targets_and_losses() -> None:
    model, x = make("relu")
    with FAM(model, "2") as fam:
        model(x)
        with pytest.raises(sf.DataError, match="Targets do not fit"):
            fam(LABELS[:2])
    ignored = torch.zeros_like(LABELS)
    assert np.isnan(penalty(model, x, ignored, "4", loss=nn.CrossEntropyLoss(ignore_index=0)))
    weighted = nn.CrossEntropyLoss(torch.ones(K).double(), ignore_index=0)
    with FAM(model, "4", loss=weighted) as fam:
        model(x)
        with pytest.raises(sf.DataError, match="all targets are ignored"):
            fam(ignored)
    wide = nn.Linear(4, 700).double()
    with FAM(wide, "", loss=lambda o, y: o.square().mean() ** 2) as fam:
        wide(x)
        with pytest.raises(sf.LossError, match=r"couples the samples .* 4200 outputs"):
            fam(LABELS)


def test_warns_of_the_price() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1030)).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    with FAM(model, "0") as fam:
        model(x)
        with pytest.warns(UserWarning, match="1030 outputs per sample"):
            fam(LABELS[:2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:BatchNorm in training mode")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cuda(dtype: torch.dtype) -> None:
    """BatchNorm runs as another operation there."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, K)
    ).to(dtype)
    x = torch.randn(N, 2, 5, 5, dtype=dtype)
    results = []
    for device in ("cpu", "cuda"):
        here = copy.deepcopy(model).to(device)
        for estimator in (None, sf.Hutchinson(4000)):
            with FAM(here, ["0", "4"], 1.0, estimator=estimator) as fam:
                here(x.to(device))
                value = fam(LABELS.to(device))
            gradients = torch.autograd.grad(value, list(here.parameters()), materialize_grads=True)
            results.append([value.cpu(), *(g.cpu() for g in gradients)])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    exact, rough, other, other_rough = results
    scale = max(float(g.detach().abs().max()) for g in exact)
    for a, b in zip(exact, other, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale)
    for estimate in (rough, other_rough):
        assert torch.allclose(estimate[0], exact[0], rtol=0.1)

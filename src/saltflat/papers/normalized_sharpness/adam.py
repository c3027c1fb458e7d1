"""Small networks of one shape, trained together by Adam as one batched network.

A convolution with weights of every network's own would be a grouped one. Here it is the product of
the weights with what the kernel sees: copied out once for all networks, and multiplied sample by
sample, so that the gradient of the weights is many short sums instead of one that is as long as all
positions of all samples. Which of the two is faster on a GPU has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from saltflat.sweep import Parameters, Replayed, stacked, write_back


def adam_together(
    models: Sequence[nn.Module], x: Tensor, y: Tensor, rows: Callable[[int], Tensor], steps: int
) -> None:
    """Train all models by Adam with its defaults, each on its own batches and labels.

    As `saltflat.sweep.train_together` does by SGD: member m's step t is on the samples `rows(t)[m]`
    of `x`, with the labels `y[m]`. Adam treats every number by itself, so that one optimizer of the
    stacked parameters is one for each model. On a GPU the step is one CUDA graph.
    """
    parameters = stacked(models)
    adam = torch.optim.Adam(parameters.values(), capturable=x.is_cuda, fused=x.is_cuda)
    members = torch.arange(len(models), device=x.device)[:, None]
    chosen = rows(0).clone()

    def risk(parameters: Parameters, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum over models: a model's parameters have a part in its own alone."""
        logits = outputs(models[0], parameters, inputs).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.shape[1]

    @torch.no_grad()
    def step() -> None:
        slopes = grad(risk)(parameters, x[chosen], y[members, chosen])
        for name, parameter in parameters.items():
            parameter.grad = slopes[name].contiguous()  # as fused steps want it
        adam.step()

    replayed = Replayed(step, x.device)
    for t in range(steps):
        if t:
            chosen.copy_(rows(t))
        replayed()
    write_back(parameters, models)


def outputs(model: nn.Module, parameters: Parameters, x: Tensor, prefix: str = "") -> Tensor:
    """Of every network, for inputs (networks, samples, …); `parameters` are stacked.

    `model` says what the layers are: linear ones, convolutions of stride 1, and layers without
    parameters that treat every sample by itself.
    """
    assert isinstance(model, nn.Sequential)
    for name, layer in model.named_children():
        name = f"{prefix}{name}"
        if isinstance(layer, nn.Sequential):
            x = outputs(layer, parameters, x, f"{name}.")
        elif isinstance(layer, nn.Linear):
            x = _product(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
        elif isinstance(layer, nn.Conv2d):
            x = _convolution(layer, x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
        else:
            assert not any(True for _ in layer.parameters())
            x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)


def _convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plain = (
        layer.stride == layer.dilation == (1, 1),
        layer.groups == 1,
        layer.padding_mode == "zeros",
    )
    assert all(plain)
    assert isinstance(layer.padding, tuple)
    (down, across), (height, width) = layer.padding, layer.kernel_size
    padded, rows = F.pad(x, (across, across, down, down)), weight.flatten(2)
    if padded.shape[-2:] == (height, width):  # which sees all there is: a linear layer
        return _product(padded.flatten(2), rows, bias)[..., None, None]
    seen = padded.unfold(3, height, 1).unfold(4, width, 1)  # …, channels, down, across, *kernel
    place = seen.shape[3:5]
    columns = seen.permute(0, 1, 2, 5, 6, 3, 4).flatten(5).flatten(2, 4)
    result = rows[:, None] @ columns
    result = result if bias is None else result + bias[:, None, :, None]
    return result.reshape(*result.shape[:3], *place)

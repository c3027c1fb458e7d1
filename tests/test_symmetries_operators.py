"""Every operator of PyTorch's own database keeps its function under the group that is found."""

from __future__ import annotations

import pytest
import torch
from operators import FORMS, OPERATORS, Around, answers, drift, samples

from saltflat import ModelError
from saltflat.symmetries import symmetries

#: what torch says of models that cannot be traced or differentiated at all
TORCH = (
    "not differentiable with respect to argument",
    "a leaf Variable that requires grad is being used in an in-place operation",
    "cannot resize variables that require grad",
    "Could not run 'aten::",
)
#: memory that was never written has no value to keep
UNDEFINED = ("empty", "new_empty")
#: operators of two operands and more, of many forms, and those with a rule of their own
FEW = (
    "addcdiv", "addmv", "baddbmm", "cat", "complex", "cumsum", "div.no_rounding_mode", "gather",
    "hypot", "index_add", "linalg.solve", "masked_fill", "matmul", "max.reduction_with_dim",
    "nn.functional.bilinear", "nn.functional.conv_transpose2d", "nn.functional.grid_sample",
    "nn.functional.group_norm", "nn.functional.prelu", "ormqr", "pow", "scatter_add", "var", "view",
)  # fmt: skip


def keeps(name: str, count: int) -> None:
    """The first samples of an operator, in both forms; only torch's own errors may pass."""
    for sample in samples(name, count):
        for form in FORMS:
            try:
                model = Around(sample, form)
                example = model.example()
                before = answers(model, example)
            except Exception:
                continue  # the operator does not take such operands
            try:
                group = symmetries(model, example, output=lambda out: out)
                moved = group.random(0, 4.0)(model)
            except ModelError:
                continue
            except Exception as error:
                if any(words in str(error) for words in TORCH):
                    continue
                raise
            assert drift(before, answers(moved, example)) <= 1e-9, (form, group)


@pytest.mark.parametrize("name", FEW)
def test_some_operators(name: str) -> None:
    keeps(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPERATORS if not n.startswith(UNDEFINED)])
def test_all_operators(name: str) -> None:
    keeps(name, 2)


def test_a_group_that_is_too_large_is_seen() -> None:
    """The comparison itself: a factor on an operand that the group pins moves the outputs."""
    sample = next(iter(samples("hypot", 1)))
    model = Around(sample, "weights")
    example = model.example()
    before = answers(model, example)
    with torch.no_grad():
        model.operands[1].mul_(2.0)
    assert drift(before, answers(model, example)) > 1e-2

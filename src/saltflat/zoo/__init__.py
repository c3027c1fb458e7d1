"""The networks of the papers, as plain modules with PyTorch's default initialisation.

They are ordinary `nn.Module`s: nothing in saltflat treats them differently from a user's own.
"""

from saltflat.zoo.ibayashi import ibayashi_cnn, ibayashi_mlp
from saltflat.zoo.lenet import lenet5
from saltflat.zoo.mlp import mlp
from saltflat.zoo.resnet import resnet18
from saltflat.zoo.vgg import vgg11
from saltflat.zoo.wide_resnet import wide_resnet16_4

__all__ = [
    "ibayashi_cnn",
    "ibayashi_mlp",
    "lenet5",
    "mlp",
    "resnet18",
    "vgg11",
    "wide_resnet16_4",
]

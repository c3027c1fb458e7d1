"""The networks of the papers, as plain modules with PyTorch's default initialisation.

They are ordinary `nn.Module`s: nothing in saltflat treats them differently from a user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


def mlp(sizes: Sequence[int], bias: bool = True) -> nn.Sequential:
    """Linear layers of the given sizes with a ReLU between any two: `mlp([784, 20, 20, 10])`.

    Inputs of any shape are flattened first. `bias=False` is the setting of Theorem 1 of Minimum
    Sharpness (Ibayashi et al., 2021).
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def ibayashi_mlp() -> nn.Sequential:
    """784-20-20-10 for MNIST (Minimum Sharpness, Ibayashi et al. 2021, appendix F)."""
    return mlp([784, 20, 20, 10])


def ibayashi_cnn() -> nn.Sequential:
    """Two 5×5 convolutions of 20 channels, each with ReLU and 2×2 max pooling, and one linear.

    For MNIST, of the same appendix.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20 * 4 * 4, 10),
    )


def lenet5() -> nn.Sequential:
    """LeNet-5 for 1×28×28 images: 6, 16 and 120 channels, 84 hidden units, 10 logits.

    As in Minimum Sharpness (Ibayashi et al., 2021, appendix D) and LeCun et al. (1998), the layer
    of 120 units is a 5×5 convolution. Its input is 5×5, so it computes what the linear layer found
    in many reimplementations does. ReLU and max pooling stand where LeCun et al. have tanh and
    trainable averages, and two pixels of padding make 32×32 of MNIST's 28×28.
    """
    return nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, kernel_size=5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


_CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(batch_norm: bool = True) -> nn.Sequential:
    """VGG-11 for 3×32×32 images, 10 logits (Simonyan & Zisserman, 2014, configuration A).

    BN-Sharpness ("BN-invariant sharpness regularizes the training model to better generalization",
    section 5) trains it with BatchNorm on CIFAR-10. Five poolings leave one position of 512
    channels, so that one linear layer takes the place of the three meant for ImageNet.
    """
    layers: list[nn.Module] = []
    channels = 3
    for step in _CHANNELS:
        if isinstance(step, int):
            layers.append(nn.Conv2d(channels, step, kernel_size=3, padding=1))
            layers += [nn.BatchNorm2d(step), nn.ReLU()] if batch_norm else [nn.ReLU()]
            channels = step
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around an identity, or a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu2(out + self.shortcut(x))
        return result


def resnet18() -> nn.Sequential:
    """ResNet-18 for 3×32×32 images, 10 logits (He et al., 2016).

    FAM ("Relative Flatness Aware Minimization", section 4) trains it on CIFAR-10. The stem is one
    3×3 convolution without pooling, as usual for small images: ImageNet's would leave 8×8 of 32×32.
    """
    stages = [
        block
        for inputs, outputs, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        for block in (BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class PreActivationBlock(nn.Module):
    """BatchNorm and ReLU come before each of the two convolutions; the sum stays linear."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.bn1(x))
        # Where the shape changes, the shortcut starts behind the first activation.
        shortcut = x if self.shortcut is None else self.shortcut(active)
        result: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(active)))) + shortcut
        return result


def wide_resnet16_4() -> nn.Sequential:
    """WideResNet with 16 layers and width factor 4, 3×32×32 images, 10 logits.

    Zagoruyko & Komodakis (2016), without dropout; Normalized Flat Minima (Tsuzuku et al., 2020,
    section 6 and appendix E) trains it on CIFAR-10.
    """
    blocks = [
        block
        for inputs, outputs, stride in [(16, 64, 1), (64, 128, 2), (128, 256, 2)]
        for block in (
            PreActivationBlock(inputs, outputs, stride),
            PreActivationBlock(outputs, outputs, 1),
        )
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        *blocks,
        nn.BatchNorm2d(256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )

"""The networks of the papers, as plain modules with PyTorch's default initialisation.

They are ordinary `nn.Module`s: nothing in saltflat treats them differently from a user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from saltflat.errors import InvalidValue


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


def ibayashi_fcnn() -> nn.Sequential:
    """784-512-128-512-10 for MNIST, with biases (the same paper, figure 2 and appendix D).

    The appendix has "three FC layers with 128 or 512 hidden dimensions". That these are hidden
    layers, their order, and that they have biases, is in the public code of the paper.
    """
    return mlp([784, 512, 128, 512, 10])


def petzka_mlp() -> nn.Sequential:
    """784-50-50-50-30-10 for MNIST, with biases.

    "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks" (Petzka et al., 2019)
    trains it in its appendix, from Xavier's normal initialisation, which is left to the caller. The
    paper does not tell of biases.
    """
    return mlp([784, 50, 50, 50, 30, 10])


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


def lenet5(channels: int = 1, batch_norm: bool = False) -> nn.Sequential:
    """LeNet-5: convolutions of 6, 16 and 120 channels, 84 hidden units, 10 logits.

    One channel is for 1×28×28 images, more are for 32×32.

    As in Minimum Sharpness (Ibayashi et al., 2021, appendix D) and LeCun et al. (1998), the layer
    of 120 units is a 5×5 convolution. Its input is 5×5, so it computes what the linear layer found
    in many reimplementations does. ReLU and max pooling stand where LeCun et al. have tanh and
    trainable averages, and two pixels of padding make 32×32 of MNIST's 28×28. Normalized Flat
    Minima (Tsuzuku et al., 2020, section 6) and Petzka et al. (2019) train a LeNet on CIFAR-10
    without saying more; `lenet5(3)` is this one with three channels.

    `batch_norm=True` puts BatchNorm between every layer but the last and its ReLU: BN-Sharpness
    (section 5) trains a "fully batch normalized LeNet" on CIFAR-10.
    """

    def active(layer: nn.Module, norm: nn.Module, *after: nn.Module) -> list[nn.Module]:
        return [layer, *([norm] if batch_norm else []), nn.ReLU(), *after]

    first = nn.Conv2d(channels, 6, kernel_size=5, padding=2 if channels == 1 else 0)
    return nn.Sequential(
        *active(first, nn.BatchNorm2d(6), nn.MaxPool2d(2)),
        *active(nn.Conv2d(6, 16, kernel_size=5), nn.BatchNorm2d(16), nn.MaxPool2d(2)),
        *active(nn.Conv2d(16, 120, kernel_size=5), nn.BatchNorm2d(120), nn.Flatten()),
        *active(nn.Linear(120, 84), nn.BatchNorm1d(84)),
        nn.Linear(84, 10),
    )


_CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(batch_norm: bool = True, classes: int = 10) -> nn.Sequential:
    """VGG-11 for 3×32×32 images (Simonyan & Zisserman, 2014, configuration A).

    BN-Sharpness ("BN-invariant sharpness regularizes the training model to better generalization",
    section 5) trains it with BatchNorm on CIFAR-10 and CIFAR-100. Five poolings leave one position
    of 512 channels, so that one linear layer takes the place of the three meant for ImageNet.
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
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


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


def resnet18(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """ResNet-18 for small images of so many channels (He et al., 2016).

    FAM ("Relative Flatness Aware Minimization", section 4) trains it on CIFAR-10. The stem is one
    3×3 convolution without pooling, as usual for small images: ImageNet's would leave 8×8 of 32×32.
    The last stage is averaged over whatever is left, so that 1×28×28 images do too
    (`channels=1`).
    """
    stages = [
        block
        for inputs, outputs, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        for block in (BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
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
    return nn.Sequential(*_wide_resnet(blocks=2, width=4, channels=3), nn.Linear(256, 10))


def wide_resnet28_10(
    feature_layer: int | None = None, channels: int = 3, classes: int = 10
) -> nn.Sequential:
    """WideResNet with 28 layers and width factor 10, for 32×32 images, without dropout.

    Zagoruyko & Komodakis (2016). FAM ("Relative Flatness Aware Minimization", section 4.1.3) trains
    it on SVHN and Fashion-MNIST, with "one more penultimate fully-connected layer" of 64 neurons:
    `feature_layer=64`. That it has a bias and is followed by ReLU is chosen here.
    """
    body = _wide_resnet(blocks=4, width=10, channels=channels)
    if feature_layer is None:
        return nn.Sequential(*body, nn.Linear(640, classes))
    head = nn.Linear(feature_layer, classes)
    return nn.Sequential(*body, nn.Linear(640, feature_layer), nn.ReLU(), head)


def _wide_resnet(blocks: int, width: int, channels: int) -> list[nn.Module]:
    """All but the linear layers: three groups of so many blocks."""
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
    inputs = 16
    for outputs, stride in [(16 * width, 1), (32 * width, 2), (64 * width, 2)]:
        layers.append(PreActivationBlock(inputs, outputs, stride))
        layers += [PreActivationBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        inputs = outputs
    return [*layers, nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def shape_autoencoder(side: int = 64) -> nn.Sequential:
    """Auto-encoder of 1×64×64×64 volumes with eight latent variables; its outputs are logits.

    FAM ("Relative Flatness Aware Minimization", section 4.2.2 and table 2) completes skulls with
    five convolutions of stride 2, a linear layer to eight latent variables, a second one "of size
    64×8", and five transposed convolutions, of about a million parameters together. The second
    linear layer, which FAM is applied to, is `model[12]`.

    Its 64 outputs are eight channels of 2×2×2. What the paper leaves open is chosen here: 16, 32,
    64 and 128 channels before those eight, kernels of 3 down and of 4 up (which divide and
    multiply sizes by exactly 2), ReLU after every layer but the latent and the last one, and no
    normalisation. Smaller volumes, of `side` 32, 16 or 8, have one, two or three convolutions less
    on either side, those with most channels, and the same linear layers.
    """
    if side not in (8, 16, 32, 64):
        raise InvalidValue(f"side must be 8, 16, 32 or 64. Got {side!r}.")
    sizes = [1, *(16, 32, 64, 128)[: side.bit_length() - 3], 8]
    down: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        down += [nn.Conv3d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    up: list[nn.Module] = []
    for inputs, outputs in pairwise(reversed(sizes)):
        up += [nn.ConvTranspose3d(inputs, outputs, 4, stride=2, padding=1), nn.ReLU()]
    latent = [nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 64), nn.ReLU()]
    return nn.Sequential(*down, *latent, nn.Unflatten(1, (8, 2, 2, 2)), *up[:-1])

"""WideResNet-16-4, used by Normalized Flat Minima."""

from __future__ import annotations

from torch import Tensor, nn


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

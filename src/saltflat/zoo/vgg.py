"""VGG-11 at CIFAR size, used by BN-Sharpness."""

from __future__ import annotations

from torch import nn

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

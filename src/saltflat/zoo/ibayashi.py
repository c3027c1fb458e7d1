"""The two small networks on which Minimum Sharpness was timed.

Ibayashi et al., "Minimum sharpness: scale-invariant parameter-robustness of neural networks"
(2021), appendix F. Both take MNIST images, 1×28×28, and give 10 logits.
"""

from __future__ import annotations

from torch import nn

from saltflat.zoo.mlp import mlp


def ibayashi_mlp() -> nn.Sequential:
    """Three linear layers, 784-20-20-10."""
    return mlp([784, 20, 20, 10])


def ibayashi_cnn() -> nn.Sequential:
    """Two 5×5 convolutions of 20 channels, each with ReLU and 2×2 max pooling, and one linear."""
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

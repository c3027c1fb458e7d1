"""LeNet-5, used by four of the five papers."""

from __future__ import annotations

from torch import nn


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

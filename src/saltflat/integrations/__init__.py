"""Training frameworks: Lightning and Hugging Face transformers.

Neither is imported before one of these names is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "SharpnessCallback": "lightning",
    "SharpnessModuleMixin": "lightning",
    "SharpnessTrainer": "transformers",
    "SharpnessTrainerCallback": "transformers",
    "SharpnessTrainerMixin": "transformers",
}

__all__ = [
    "SharpnessCallback",
    "SharpnessModuleMixin",
    "SharpnessTrainer",
    "SharpnessTrainerCallback",
    "SharpnessTrainerMixin",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""How a sweep over the data is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Certify = Literal["proof", "probe", "none"]

# On a CPU: a chunk's bytes.
_LEAST, _MOST = 1 << 26, 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """How the pass is carried out: what is sketched, what is probed, and in what portions."""

    max_directions: int = 1000
    memory_budget: int | None = None
    certify: Certify = "proof"

    def budget(self, device: torch.device, weights: int = 0) -> int:
        """Bytes that one chunk may take, of a model with `weights` bytes of parameters.

        A chunk reads every weight once for every direction, so large weights want large chunks;
        for small ones a chunk that stays near the processor's cache is as fast.
        """
        if self.memory_budget is not None:
            return self.memory_budget
        if device.type == "cuda":
            # What torch has set aside and not given out is free too.
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int((torch.cuda.mem_get_info(device)[0] + idle) // 2)
        return min(_MOST, max(_LEAST, 64 * weights))

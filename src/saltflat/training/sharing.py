"""An optimizer around another one, with the same parameter groups and state."""

from __future__ import annotations

import weakref
from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch.optim import LBFGS, Optimizer

from saltflat.errors import InvalidType

_SHARED_HOOKS = tuple(
    f"_optimizer_{verb}_{when}_hooks"
    for verb in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


class SharingOptimizer(Optimizer, ABC):
    """Groups, state and state-dict hooks are those of `base`; `defaults` are settings on top."""

    base: Optimizer

    def __init__(self, base: Optimizer, defaults: dict[str, Any]) -> None:
        check_base(base, type(self).__name__)
        super().__init__([dict(group) for group in base.param_groups], defaults)
        self._adopt(base)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        self.defaults = {**base.defaults, **defaults}

    def _setting(self, group: Mapping[str, Any], name: str) -> Any:
        # Groups that the base optimizer added or loaded do not hold it.
        return group.get(name, self.defaults[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        base = self.__dict__.get("base")
        if base is None:  # during construction; the base has its groups already
            super().add_param_group(param_group)
            return
        base.add_param_group(param_group)
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def _keep_settings(self, base: Optimizer) -> None:
        """Groups that were loaded from a plain optimizer's state keep the settings of this one."""
        for old, new in zip(self.param_groups, base.param_groups, strict=True):
            for name in self.defaults.keys() - base.defaults.keys():
                if name in old:
                    new.setdefault(name, old[name])

    def _adopt(self, base: Optimizer) -> None:
        self.base = base
        for name in _SHARED_HOOKS:
            setattr(self, name, getattr(base, name))
        itself = weakref.ref(self)

        def link(base: Optimizer) -> None:
            if (optimizer := itself()) is not None:
                optimizer._keep_settings(base)
                optimizer.param_groups, optimizer.state = base.param_groups, base.state

        base.register_load_state_dict_post_hook(link)
        self.param_groups, self.state = base.param_groups, base.state

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({k: v for k, v in state.items() if k != "base"})
        self._adopt(state["base"])


def check_base(base: Any, name: str) -> None:
    """Refuse what cannot be the base of the optimizer `name`."""
    if not isinstance(base, Optimizer):
        raise InvalidType(
            f"{name} wraps an optimizer that is there already: "
            f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), …). Got {type(base).__name__} in "
            "its place."
        )
    if isinstance(base, SharingOptimizer | LBFGS):
        raise InvalidType(
            f"{type(base).__name__} evaluates the loss itself and cannot be the base of another "
            "optimizer. Use one whose step() needs no closure."
        )

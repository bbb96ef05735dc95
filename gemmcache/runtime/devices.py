"""The devices that a bundle serves on, as far as a call must know them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class CudaDevices:
    """The CUDA devices of one compute capability. Tests put devices of their own in its place."""

    type = "cuda"

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._known: dict[int, bool] = {}

    def serves(self, device: torch.device) -> bool:
        """Whether kernels of the bundle run on `device`."""
        if device.type != self.type:
            return False
        index = device.index or 0
        known = self._known.get(index)
        if known is None:
            known = self._known[index] = torch.cuda.get_device_capability(index) == self._capability
        return known

    def is_current(self, device: torch.device) -> bool:
        """Whether launches go to `device` as things are."""
        return device.index == torch.cuda.current_device()

    def wait(self) -> None:
        """Waits for everything queued on the current device."""
        torch.cuda.synchronize()

    def made_current(self, device: torch.device) -> AbstractContextManager[None]:
        """Makes `device` current for a `with` block, and the one before current again after it."""
        return torch.cuda.device(device)

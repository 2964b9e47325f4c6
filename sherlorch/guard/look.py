"""One fused look: are these tensors all finite?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sherlorch import health
from sherlorch.health import FLOATING


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """False also where a sum of healthy values overflowed. One synchronisation per device.

    NaN and Inf survive every sum and every norm. On the CPU a sum is the cheapest way through memory; on an
    accelerator the norms of all tensors come out of one fused kernel, and only their total is read.
    """
    total = 0.0
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sums: list[Tensor] = []
    with torch.no_grad():
        for tensor in tensors:
            if (
                tensor.layout is not torch.strided
                or tensor.dtype not in FLOATING
                or tensor.element_size() == 1
            ):
                if health.examine(tensor):
                    return False
            elif tensor.is_cpu:
                sums.append(tensor.sum())
            else:
                waiting.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        devices: dict[torch.device, list[Tensor]] = {}
        for (device, _), group in waiting.items():
            devices.setdefault(device, []).append(torch.stack(torch._foreach_norm(group)).sum().float())
        for partial in devices.values():
            total += torch.stack(partial).sum().item()
        for value in sums:
            item = value.item()
            total += abs(item)
    return total - total == 0.0

"""A feed-forward block that is fine in float32 and overflows in float16, whose largest number is 65504."""

import torch
from torch import nn

import sherlorch


class GatedFeedForward(nn.Module):
    def __init__(self, width=64, hidden=256):
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        gate = nn.functional.gelu(self.gate(x))
        hidden = gate * self.up(x)  # <- culprit
        return self.down(hidden)


torch.manual_seed(0)
model = GatedFeedForward()
x = 300 * torch.randn(4, 64)  # a residual stream grows with depth

assert model(x).isfinite().all()

with sherlorch.trace() as tracker:
    model.half()
    tracker.watch(model, name="model")
    y = model(x.half())

print(tracker.diagnose(y))

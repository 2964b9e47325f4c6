"""The loss is fine and the gradient is NaN: `where` hides the zero distances from the forward pass only."""

import torch
from torch import nn

import sherlorch


def pairwise_distances(x):
    squared = (x[:, None] - x[None, :]).pow(2).sum(dim=-1)
    return torch.where(squared > 0, squared.sqrt(), torch.zeros_like(squared))  # <- culprit


torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
points, labels = torch.randn(12, 16), torch.arange(12) % 3
same = labels[:, None] == labels[None, :]

with sherlorch.trace(level="aten") as tracker:
    tracker.watch(encoder, name="encoder")
    distances = pairwise_distances(encoder(points))
    loss = torch.where(same, distances, (1 - distances).relu()).mean()
    loss.backward()

print(f"loss {loss.item():.3f}\n")
print(tracker.diagnose(encoder[0].weight.grad))

"""A compiled model whose gradient is NaN: the checks are part of the generated kernels, backward included."""

import torch
from torch import nn

import sherlorch


class Distance(nn.Module):
    def forward(self, x, center):
        return torch.sqrt(((x - center) ** 2).sum(-1))  # <- culprit


class Prototypes(nn.Module):
    """Classifies by the distance to learned centers, which start at the origin."""

    def __init__(self, width=16, classes=4):
        super().__init__()
        self.lift = nn.Linear(width, width)
        self.centers = nn.Parameter(torch.zeros(classes, width))
        self.distance = Distance()

    def forward(self, x):
        x = torch.relu(self.lift(x)).unsqueeze(1)
        return -self.distance(x, self.centers)


torch.manual_seed(0)
model = Prototypes()
compiled = sherlorch.compile(model)
batch, labels = torch.randn(32, 16), torch.randint(4, (32,))
batch[0] = 0
nn.init.zeros_(model.lift.bias)  # so that this sample is exactly at the origin too

loss = nn.functional.cross_entropy(compiled(batch), labels)
loss.backward()

print(f"loss {loss.item():.2f}, and {int(model.centers.grad.isnan().sum())} gradients of the centers are NaN")
print(compiled.checks.diagnose())

"""A parameter that came bad out of its file: in the float16 checkpoint one weight overflowed."""

import io

import torch
from torch import nn

import sherlorch


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        scaled = hidden * self.scale  # <- culprit
        return self.head(scaled)


torch.manual_seed(0)
trained = Regressor()
with torch.no_grad():
    trained.scale[7] = 70_000.0
checkpoint = io.BytesIO()
torch.save({name: value.half() for name, value in trained.state_dict().items()}, checkpoint)
checkpoint.seek(0)

model = Regressor()
model.load_state_dict(torch.load(checkpoint, weights_only=True))

with sherlorch.trace() as tracker:
    tracker.watch(model, name="model")
    loss = nn.functional.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 1))

print(tracker.diagnose(loss))

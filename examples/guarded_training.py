"""Training that meets a bad batch: the step is stopped and explained, and training goes on without it.

Run it with the number of the step that goes wrong: python examples/guarded_training.py 12
"""

import sys
import tempfile

import torch
from torch import nn

import sherlorch

torch.manual_seed(0)
bad_step = int(sys.argv[1]) if len(sys.argv) > 1 else 12


class Normalise(nn.Module):
    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return centred / centred.norm(dim=1, keepdim=True)  # <- culprit


model = nn.Sequential(Normalise(), nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
faults = tempfile.mkdtemp(prefix="faults-")


@sherlorch.Guard(model, optimizer, save_dir=faults)
def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


for step in range(1, 21):
    x = torch.randn(64, 8)
    y = x.argmax(1, keepdim=True) / 8
    if step == bad_step:
        x[17] = 3.5  # a constant row: its centred values, and so their norm, are zero
    try:
        loss = train_step(x, y)
    except sherlorch.NonFiniteError as error:
        print(error)
        continue
    if step % 5 == 0:
        print(f"step {step}  loss {loss:.4f}")

"""A training step whose loss is NaN: the bug is log(relu(x)), two submodules deep."""

import torch
from torch import nn

import sherlorch


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, x):
        return torch.log(torch.relu(self.project(x)))  # <- culprit


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(width, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.gate = Gate(width)

    def forward(self, x):
        x = self.encoder(x)
        return x * torch.sigmoid(self.gate(x)) + self.gate(x)


class Classifier(nn.Module):
    def __init__(self, vocabulary=100, width=32, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([GatedBlock(width), GatedBlock(width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters())
tokens, labels = torch.randint(100, (4, 16)), torch.randint(5, (4,))

with sherlorch.trace(level="aten") as tracker:
    tracker.watch(model, name="model")
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()

print(tracker.diagnose(loss))

"""The program behind `sherlorch demo`: a character model whose training breaks after a few steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import sherlorch

TEXT = "when you have eliminated the impossible, whatever remains, however improbable, must be the truth. "
WIDTH = 32
STEPS = 20


class LogGate(nn.Module):
    """A learned gate on a logarithmic scale; it starts near log(1) = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.project.weight, std=0.02)
        nn.init.ones_(self.project.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(self.project(x)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.gate = LogGate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.expand(x))
        return self.contract(hidden) + self.gate(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(self.feed_forward_norm(x))


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[-1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def setup() -> tuple[CharacterModel, torch.Tensor]:
    """The model and one batch of 8 windows of the text, the same on each call."""
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    tokens = torch.tensor([alphabet.index(character) for character in TEXT])
    return CharacterModel(len(alphabet)), tokens.unfold(0, 25, 10)


def train(model: CharacterModel, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the loss of each step, up to the first that is NaN."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
        if loss.isnan():
            return


def run() -> None:
    """Print what the plain program shows of its bug, then what `sherlorch` finds in the same run."""
    model, batch = setup()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"A character model, two transformer blocks, {count:,} weights, AdamW. One line of it is wrong.\n")

    print("The plain program:")
    for step, loss in enumerate(train(model, batch), start=1):
        print(f"    step {step}   loss {loss.item():.4f}")
    bad = sum(int(parameter.isnan().sum()) for parameter in model.parameters())
    print(f"    {bad:,} of {count:,} weights are NaN now, and nothing says why.\n")

    print('The same run inside sherlorch.trace(level="aten"):\n')
    model, batch = setup()
    with sherlorch.trace(level="aten") as tracker:
        tracker.watch(model, name="model")
        *_, loss = train(model, batch)
    print(tracker.diagnose(loss))

"""Train a small image classifier.

python train_classifier.py --epochs 2 --workers 2 --output runs/first
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bright squares on a dim background, and here and there a blank image, as in any real collection."""

    def __init__(self, size, blank=(), resolution=12):
        self.size = size
        self.blank = set(blank)
        self.resolution = resolution

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 4
        image = 0.1 * torch.rand(1, self.resolution, self.resolution, generator=generator)
        row, column = divmod(label, 2)
        half = self.resolution // 2
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.8
        if index in self.blank:
            image.zero_()
        return image, label


class Standardize(nn.Module):
    """Zero mean and unit variance for each image."""

    def forward(self, images):
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        std = images.std(dim=(1, 2, 3), keepdim=True)
        return (images - mean) / std  # <- the planted bug


class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.standardize = Standardize()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images):
        hidden = self.features(self.standardize(images))
        return self.head(self.dropout(hidden.flatten(1)))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--blank", type=int, nargs="*", default=[41], help="images that the scanner lost")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", choices=["fork", "spawn"], default=None)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def train_one_epoch(model, loader, optimizer, scheduler, args):
    model.train()
    total, seen = 0.0, 0
    for images, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            logits = model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(labels)
        seen += len(labels)
    return total / seen


@torch.no_grad()
def evaluate(model, loader, args):
    model.eval()
    correct, seen = 0, 0
    for images, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            logits = model(images)
        correct += (logits.argmax(dim=1) == labels).sum().item()
        seen += len(labels)
    return correct / seen


def main():
    args = parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    options = {"batch_size": args.batch_size, "num_workers": args.workers}
    if args.workers:
        options.update(persistent_workers=True, multiprocessing_context=args.start_method)
    train_loader = DataLoader(Shapes(args.size, args.blank), shuffle=True, **options)
    valid_loader = DataLoader(Shapes(16), **options)

    model = Classifier(args.width, classes=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    for epoch in range(args.epochs):
        start = time.time()
        loss = train_one_epoch(model, train_loader, optimizer, scheduler, args)
        accuracy = evaluate(model, valid_loader, args)
        print(
            f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}, {time.time() - start:.1f}s", flush=True
        )
        checkpoint = {
            "epoch": epoch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "args": {name: str(value) for name, value in vars(args).items()},
        }
        torch.save(checkpoint, args.output / "last.pt")
        torch.save(model, args.output / "model.pt")
    (args.output / "result.json").write_text(json.dumps({"loss": loss, "accuracy": accuracy}))


if __name__ == "__main__":
    main()

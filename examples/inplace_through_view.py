"""A batch normalised in place, image by image: the write goes through a view, and no line names the batch."""

import torch
from torch import nn

import sherlorch


def normalise(image):
    image -= image.mean()
    image /= image.std()  # <- culprit


torch.manual_seed(0)
batch = torch.rand(8, 3, 16, 16)
batch[5] = 0.5  # a blank frame
model = nn.Sequential(nn.Conv2d(3, 8, kernel_size=3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))

with sherlorch.trace() as tracker:
    tracker.watch(model, name="model")
    for image in batch:
        normalise(image)
    loss = nn.functional.cross_entropy(model(batch), torch.arange(8))

print(tracker.diagnose(loss))

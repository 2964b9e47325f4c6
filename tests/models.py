"""Tiny training programs of many kinds: the zoo on which claims about any model are tried."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from needs import has_torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]


@dataclass
class Program:
    """A model, what it learns from, and the optimizer that changes it."""

    model: nn.Module
    batch: Batch
    loss_of: Callable[[nn.Module, Batch], Tensor]
    optimizer: torch.optim.Optimizer
    clip: float | None = None

    def forward(self) -> Tensor:
        return self.loss_of(self.model, self.batch)

    def update(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def step(self, enter: Callable[[str], None] = lambda phase: None) -> Tensor:
        """One training step, `enter` being told of each phase; gradients stay to be looked at."""
        enter("forward")
        self.optimizer.zero_grad()
        loss = self.forward()
        enter("backward")
        loss.backward()
        enter("optimizer")
        self.update()
        return loss.detach()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a step leaves behind, by name: parameters, gradients, buffers."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad
            yield name, parameter
        yield from self.model.named_buffers()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _adamw(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    if not has_torch("2.4"):
        options.pop("fused", None)  # which is for CUDA alone
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(1, 32, shape)


def _quiet_transformers() -> None:
    """Tiny vocabularies and missing kernels are what is wanted here: nothing to log."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()


_TINY = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def gpt2() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel, __version__

    # These mask eager attention twice, and the least number plus itself is -inf.
    twice = (4, 53) <= tuple(map(int, __version__.split(".")[:2])) < (5, 0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa" if twice else "eager",
    )  # fmt: skip
    ids = _tokens(2, 7)
    model = GPT2LMHeadModel(config).train()
    return Program(model, {"input_ids": ids, "labels": ids}, _loss, _adamw(model, foreach=True), clip=1.0)


def bert() -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(**_TINY, max_position_embeddings=8, num_labels=3)
    ).train()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"input_ids": _tokens(2, 7), "attention_mask": mask, "labels": torch.tensor([0, 2])}
    return Program(model, batch, _loss, _adamw(model, fused=True))


def llama() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_TINY, num_key_value_heads=1, max_position_embeddings=8)).train()
    ids = _tokens(2, 7)
    return Program(model, {"input_ids": ids, "labels": ids}, _loss, _adamw(model, foreach=False), clip=1.0)


def t5() -> Program:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=8, d_kv=4, num_layers=1, num_decoder_layers=1, num_heads=2, d_ff=16,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    factored = getattr(torch.optim, "Adafactor", torch.optim.Adamax)  # torch 2.5
    optimizer = factored(model.parameters(), lr=1e-2)
    return Program(model, {"input_ids": _tokens(2, 7), "labels": _tokens(2, 5)}, _loss, optimizer)


def vit() -> Program:
    from transformers import ViTConfig, ViTForImageClassification

    options = {key: value for key, value in _TINY.items() if key != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**options, image_size=8, patch_size=4, num_labels=3)).train()
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    return Program(model, batch, _loss, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


def mixtral() -> Program:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_TINY, num_key_value_heads=1, max_position_embeddings=8, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config).train()
    ids = _tokens(2, 7)
    return Program(model, {"input_ids": ids, "labels": ids}, _loss, _adamw(model, foreach=True), clip=1.0)


def mamba() -> Program:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=32, hidden_size=8, state_size=4, num_hidden_layers=2, bos_token_id=0, eos_token_id=0
    )
    model = MambaForCausalLM(config).train()
    ids = _tokens(2, 7)
    return Program(model, {"input_ids": ids, "labels": ids}, _loss, _adamw(model, fused=True))


class ConvNet(nn.Module):
    """Convolutions with batch norm, a residual sum and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.block = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout(0.2)
        )
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.gelu(self.norm(x + self.block(x)))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def cnn() -> Program:
    model = ConvNet().train()
    batch = {"x": torch.randn(3, 3, 8, 8), "y": torch.tensor([0, 4, 2])}
    return Program(
        model, batch, _classify, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    )


class Tagger(nn.Module):
    """A recurrent net that reads both ways, then one that is unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.cell = nn.GRUCell(10, 6)
        self.head = nn.Linear(6, 32)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(ids))
        hidden = states.new_zeros(len(ids), 6)
        outputs = []
        for step in states.unbind(1):
            hidden = self.cell(step, hidden)
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))


def _tag(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), label_smoothing=0.1)


def lstm() -> Program:
    model = Tagger().train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    return Program(model, {"x": _tokens(2, 4), "y": _tokens(2, 4)}, _tag, optimizer, clip=0.5)


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 6))
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 9))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(latent), mean, log_variance


def _evidence_bound(model: nn.Module, batch: Batch) -> Tensor:
    logits, mean, log_variance = model(batch["x"])
    reconstruction = F.binary_cross_entropy_with_logits(logits, batch["x"], reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (reconstruction + divergence) / len(mean)


def vae() -> Program:
    model = Autoencoder().train()
    return Program(
        model,
        {"x": torch.rand(4, 9)},
        _evidence_bound,
        torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    )


class GraphNet(nn.Module):
    """Message passing with attention, written by hand: sums, means and softmaxes over the edges of a node."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 6)
        self.score = nn.Linear(12, 1)
        self.message = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = self.lift(x)
        score = F.leaky_relu(self.score(torch.cat([x[source], x[target]], -1)), 0.2).squeeze(-1)
        top = torch.full((len(x),), -1e9).scatter_reduce(0, target, score.detach(), "amax")
        weight = torch.exp(score - top[target])
        total = torch.zeros(len(x)).index_add(0, target, weight)
        weight = weight / total[target].clamp_min(1e-9)
        messages = self.message(x)[source] * weight.unsqueeze(-1)
        x = self.norm(x + torch.zeros_like(x).index_add_(0, target, messages))
        degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target)))
        pooled = torch.zeros_like(x).scatter_add(
            0, target.unsqueeze(-1).expand(-1, 6), x.index_select(0, source)
        )
        return self.head(F.elu(x + pooled / degree.clamp(min=1).unsqueeze(-1)))


def _label_nodes(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(F.log_softmax(model(batch["x"], batch["edges"]), -1), batch["y"])


def gnn() -> Program:
    model = GraphNet().train()
    edges = torch.stack([torch.randint(0, 6, (14,)), torch.arange(14) % 6])
    batch = {"x": torch.randn(6, 4), "edges": edges, "y": torch.randint(0, 3, (6,))}
    return Program(model, batch, _label_nodes, torch.optim.NAdam(model.parameters(), lr=1e-2))


class Block(nn.Module):
    """A pre-norm transformer block on `scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.wide = nn.Sequential(
            nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, 2, 4).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 8))
        return x + self.wide(x)


class Checkpointed(nn.Module):
    """Blocks that are run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed() -> Program:
    model = Checkpointed(reentrant=False).train()
    return Program(
        model, {"x": _tokens(2, 4), "y": _tokens(2, 4)}, _tag, _adamw(model, foreach=True), clip=1.0
    )


def checkpointed_reentrant() -> Program:
    model = Checkpointed(reentrant=True).train()
    return Program(model, {"x": _tokens(2, 4), "y": _tokens(2, 4)}, _tag, _adamw(model, foreach=False))


class InPlace(nn.Module):
    """Writes wherever it can: views, slices, masks, `out=`, a buffer with a moving average."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.leave = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with torch.no_grad():
            spread = torch.empty(8)
            torch.sqrt(x.detach().var(0) + 1e-3, out=spread)
            self.scale.mul_(0.9).add_(spread, alpha=0.1)
        x.div_(self.scale)
        board = torch.zeros(x.size(0), 2, 8)
        board[:, 0] = x.tanh()
        board[:, 1].copy_(x).mul_(0.5).add_(board[:, 0])
        board.select(2, 3).mul_(2)
        board.view(-1, 4)[::2].add_(0.1)
        x = board.sum(1).clone()
        x[:, :4] += x[:, 4:]
        x[:, -1].masked_fill_(x[:, -1] > 1, 0.5)
        F.relu_(x)
        x = x.clamp(max=3).add_(1).log_()
        x.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(0.25), accumulate=True)
        x.addcmul_(x.detach().clone(), x.detach().clone(), value=0.1).sub_(x.detach().mean()).exp_()
        scores = self.leave(x)
        return scores.masked_fill_(torch.tensor([False, False, False, True]), float("-inf")).softmax(-1)


def _mean_log(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch["x"])[:, :3].clone().add_(1e-6).log_().mul_(batch["y"]).sum()


def in_place() -> Program:
    model = InPlace().train()
    y = torch.softmax(torch.randn(5, 3), -1)
    return Program(
        model, {"x": torch.randn(5, 6), "y": y}, _mean_log, torch.optim.Adagrad(model.parameters(), lr=0.05)
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    make.__name__: make
    for make in (
        gpt2, bert, llama, t5, vit, mixtral, mamba, cnn, lstm, vae, gnn,
        checkpointed, checkpointed_reentrant, in_place,
    )
}  # fmt: skip
_OF_TRANSFORMERS = {"gpt2", "bert", "llama", "t5", "vit", "mixtral", "mamba"}


def make_program(name: str, seed: int = 0) -> Program:
    """The program of this name, the same each time."""
    if name in _OF_TRANSFORMERS:
        _quiet_transformers()
    torch.manual_seed(seed)
    return PROGRAMS[name]()

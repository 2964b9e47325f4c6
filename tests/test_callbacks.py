"""Callbacks in the real trainers, with a bad batch at a chosen step."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sherlorch
from sherlorch import NonFiniteError
from sherlorch.callbacks.faults import Faults

BAD = 3  # the bad batch


class Network(nn.Module):
    """Batch norm and dropout, so that there are buffers and random numbers to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(self.body(x)).squeeze(1)
        scores = scores + torch.log(x.square().sum(1))  # -inf for a row of zeros
        loss = (scores - labels).square().mean() if labels is not None else scores.mean()
        return {"loss": loss, "logits": scores}


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: int = 32, bad: tuple[int, ...] = (BAD,), size: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 4, generator=generator)
        for batch in bad:
            self.x[batch * size + 1] = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum()}


def snapshot(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def assert_finite(module: nn.Module) -> None:
    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())


def imported(name: str) -> Any:
    """A module, or a skipped test: a framework may be missing, or too new for this torch."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


def assert_told(folder: Path, stem: str) -> None:
    """The report is in files, and the repro brings the fault back."""
    text = (folder / f"{stem}.txt").read_text()
    verdict = text.partition("\n")[0]
    assert "began as -Inf in aten.log.default (log(0)) at " in verdict
    assert "test_callbacks.py:" in verdict
    data = json.loads((folder / f"{stem}.json").read_text())
    assert data["culprits"][0]["op_name"] == "aten.log.default"
    shown, came_back = sherlorch.replay.describe(sherlorch.replay.load(folder / f"{stem}.pt"), "cpu")
    assert came_back, shown


# Lightning


@pytest.fixture
def lightning() -> Any:
    return imported("lightning.pytorch")


def fit(
    lightning: Any,
    folder: Path,
    callbacks: list[Any],
    *,
    data: Data | None = None,
    manual: bool = False,
    **options: Any,
) -> Any:
    """A short training; the module has `.done`, its trainer, and `.before`, weights before each batch."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.network = Network()
            self.before: list[list[Tensor]] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            if len(self.before) <= batch_idx:
                self.before.append(snapshot(self.network))
            loss = self.network(**batch)["loss"]
            self.log("loss", loss, batch_size=4)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **options,
    )
    module.done = trainer
    loader = torch.utils.data.DataLoader(data or Data(), batch_size=4)
    try:
        trainer.fit(module, loader)
    except NonFiniteError as error:
        module.error = error
    return module


quiet = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@quiet
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_stops_before_the_weights_are_written(
    lightning: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, manual: bool
) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    callback = SherlorchCallback()
    module = fit(lightning, tmp_path, [callback], manual=manual)
    text = str(module.error)
    assert text.startswith(("NaN in `loss` ", "Inf in `loss` ")), text
    assert f"batch {BAD} of epoch 0, step {BAD}: training stopped before the weights were written" in text
    assert "module model.network" in text or "in model.network" in text
    assert all(map(torch.equal, module.before[BAD], snapshot(module.network)))
    assert_finite(module.network)
    assert_told(tmp_path / "sherlorch", f"epoch-0-batch-{BAD}")
    assert [record.getMessage() for record in caplog.records if record.name == "sherlorch"] == [text]
    assert callback.reports == [module.error.report]
    assert "log" not in vars(module)


@quiet
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_goes_on_without_the_bad_batch(lightning: Any, tmp_path: Path, manual: bool) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    module = fit(lightning, tmp_path, [SherlorchCallback(on_fault="skip")], manual=manual)
    before, after = module.before[BAD : BAD + 2]
    assert all(map(torch.equal, before, after))
    assert not all(map(torch.equal, after, module.before[BAD + 2]))
    assert len(module.before) == 8
    assert_finite(module.network)
    assert (tmp_path / "sherlorch" / f"epoch-0-batch-{BAD}.txt").exists()


@quiet
def test_lightning_ends_in_good_order(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    module = fit(lightning, tmp_path, [SherlorchCallback(on_fault="stop", folder=tmp_path / "here")])
    assert len(module.before) == BAD + 1
    assert module.done.state.finished
    assert all(map(torch.equal, module.before[BAD], snapshot(module.network)))
    assert_told(tmp_path / "here", f"epoch-0-batch-{BAD}")


@quiet
def test_lightning_drops_a_bad_batch_among_those_that_are_accumulated(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    callback = SherlorchCallback(on_fault="skip")
    module = fit(lightning, tmp_path, [callback], accumulate_grad_batches=2)
    assert len(callback.reports) == 1
    assert not all(map(torch.equal, module.before[BAD], module.before[BAD + 1]))  # of the good half
    assert_finite(module.network)


@quiet
def test_lightning_is_not_changed_by_the_callback(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    data = Data(bad=())
    plain = fit(lightning, tmp_path, [], data=data, accumulate_grad_batches=2, gradient_clip_val=0.1)
    for options in ({}, {"trace_always": True}):
        watched = fit(
            lightning,
            tmp_path,
            [SherlorchCallback(**options)],
            data=data,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
        )
        assert all(map(torch.equal, snapshot(plain.network), snapshot(watched.network)))


@quiet
def test_lightning_traces_always(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    module = fit(lightning, tmp_path, [SherlorchCallback(trace_always=True)])
    assert "traced as it ran" in str(module.error)
    assert module.error.report.culprits[0].op_name == "aten.log.default"
    assert torch._C._len_torch_dispatch_stack() == 0


@quiet
def test_lightning_says_that_a_fault_did_not_come_back(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    once = iter([float("nan")])

    class Spoil(lightning.Callback):  # type: ignore[misc]
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if trainer.global_step == BAD:
                loss.data.mul_(next(once, 1.0))

    module = fit(lightning, tmp_path, [Spoil(), SherlorchCallback()], data=Data(bad=()))
    assert "NOT REPRODUCED" in str(module.error)
    assert_finite(module.network)


def scaled() -> Any:
    """Mixed precision in float16 with a gradient scaler, on the CPU."""
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("a GradScaler on the CPU: torch 2.3")
    from lightning.pytorch import plugins

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    return plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


@quiet
def test_lightning_leaves_an_overflow_to_the_scaler(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    data = Data(bad=())
    data.x[BAD * 4] = 1e4  # its loss is finite, its scaled gradients are not
    callback = SherlorchCallback()
    module = fit(lightning, tmp_path, [callback], data=data, plugins=[scaled()])
    assert module.done.precision_plugin.scaler.get_scale() == 128
    assert not callback.reports
    assert len(module.before) == 8


@quiet
def test_lightning_tells_of_a_scale_that_falls_and_falls(lightning: Any, tmp_path: Path) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    data = Data(rows=48, bad=tuple(range(1, 12)))
    module = fit(lightning, tmp_path, [SherlorchCallback()], data=data, plugins=[scaled()])
    assert "the gradient scaler left out 10 steps in a row, and its scale fell to 0.25" in str(module.error)
    assert module.error.report.culprits[0].op_name == "aten.log.default"
    assert_finite(module.network)


@quiet
@pytest.mark.parametrize("on_fault", ["raise", "skip"])
def test_lightning_does_not_leave_a_loss_that_is_nan_to_the_scaler(
    lightning: Any, tmp_path: Path, on_fault: str
) -> None:
    from sherlorch.callbacks.lightning import SherlorchCallback

    data = Data(bad=())
    data.x[BAD * 4] = float("nan")
    callback = SherlorchCallback(on_fault=on_fault)
    module = fit(lightning, tmp_path, [callback], data=data, plugins=[scaled()])
    (report,) = callback.reports
    assert report.culprits[0].origin == "outside"
    assert len(module.before) == (BAD + 1 if on_fault == "raise" else 8)
    assert_finite(module.network)


# transformers


def train(folder: Path, callback: Any, *, data: Data | None = None, **options: Any) -> Any:
    """A short training with a real Trainer; what it returns has `.before` and, if it raised, `.error`."""
    transformers = imported("transformers")

    class Recorder(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            seen = id(inputs)
            if seen not in self.seen:
                self.seen.append(seen)
                self.alive.append(inputs)
                self.before.append(snapshot(model))
            loss: Tensor = super().training_step(model, inputs, *args)
            return loss

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    torch.manual_seed(0)
    trainer = Recorder(
        model=Network(),
        args=arguments,
        train_dataset=data or Data(),
        callbacks=[callback] if callback else [],
    )
    trainer.before, trainer.seen, trainer.alive = [], [], []
    try:
        trainer.train()
    except NonFiniteError as error:
        trainer.error = error
    return trainer


@pytest.fixture
def callback_class() -> Any:
    imported("accelerate")
    return imported("sherlorch.callbacks.transformers").SherlorchCallback


@quiet
def test_transformers_stops_before_the_weights_are_written(
    callback_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = callback_class()
    trainer = train(tmp_path, callback)
    text = str(trainer.error)
    assert text.startswith(("NaN in `loss` ", "Inf in `loss` ")), text
    assert f"batch of step {BAD + 1}, epoch 0.38: training stopped before the weights were written" in text
    assert all(map(torch.equal, trainer.before[BAD], snapshot(trainer.model)))
    assert_finite(trainer.model)
    assert_told(tmp_path / "sherlorch", f"step-{BAD + 1}")
    assert [record.getMessage() for record in caplog.records if record.name == "sherlorch"] == [text]
    assert callback.reports == [trainer.error.report]


@quiet
def test_transformers_goes_on_without_the_bad_batch(callback_class: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, callback_class(on_fault="skip"))
    before, after = trainer.before[BAD : BAD + 2]
    assert all(map(torch.equal, before, after))
    assert len(trainer.before) == 8
    assert trainer.state.global_step == 8
    assert not all(map(torch.equal, after, trainer.before[BAD + 2]))
    assert_finite(trainer.model)
    assert "training_step" not in vars(trainer)


@quiet
def test_transformers_ends_in_good_order(callback_class: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, callback_class(on_fault="stop", folder=tmp_path / "here"))
    assert len(trainer.before) == BAD + 1
    assert all(map(torch.equal, trainer.before[BAD], snapshot(trainer.model)))
    assert_told(tmp_path / "here", f"step-{BAD + 1}")


@quiet
def test_transformers_drops_a_bad_batch_among_those_that_are_accumulated(
    callback_class: Any, tmp_path: Path
) -> None:
    callback = callback_class(on_fault="skip")
    trainer = train(tmp_path, callback, gradient_accumulation_steps=2)
    assert len(callback.reports) == 1
    assert not all(map(torch.equal, trainer.before[BAD], trainer.before[BAD + 1]))
    assert_finite(trainer.model)


@quiet
def test_transformers_is_not_changed_by_the_callback(callback_class: Any, tmp_path: Path) -> None:
    data = Data(bad=())
    plain = train(tmp_path, None, data=data, gradient_accumulation_steps=2)
    for options in ({}, {"trace_always": True}):
        watched = train(tmp_path, callback_class(**options), data=data, gradient_accumulation_steps=2)
        assert all(map(torch.equal, snapshot(plain.model), snapshot(watched.model)))


@quiet
def test_transformers_traces_always(callback_class: Any, tmp_path: Path) -> None:
    trainer = train(tmp_path, callback_class(trace_always=True))
    assert "traced as it ran" in str(trainer.error)
    assert trainer.error.report.culprits[0].op_name == "aten.log.default"
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_callback_outside_of_a_trainer_says_what_to_do(callback_class: Any) -> None:
    with pytest.raises(sherlorch.SherlorchError, match=r"not called by a transformers\.Trainer"):
        callback_class().on_train_begin(None, None, None)


# accelerate


@quiet
def test_a_guard_around_a_step_of_accelerate() -> None:
    accelerate = imported("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    @sherlorch.Guard(network, optimizer)
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = network(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for index, batch in enumerate(loader):
        before = snapshot(network)
        if index != BAD:
            assert torch.isfinite(step(batch))
            continue
        with pytest.raises(NonFiniteError, match="seen before the optimizer wrote") as caught:
            step(batch)
        assert caught.value.report.culprits[0].op_name == "aten.log.default"
        assert all(map(torch.equal, before, snapshot(network)))


# What they share


def test_skipping_ends(tmp_path: Path) -> None:
    faults = Faults("skip", tmp_path, 3)
    report = sherlorch.DiagnosisReport(None)

    def meet() -> None:
        faults.meet(report, "bad", name="step-1", where="step 1", folder=tmp_path)

    meet()
    meet()
    faults.good()
    meet()
    meet()
    with pytest.raises(NonFiniteError, match="step 1: 3 bad in a row: training stopped"):
        meet()
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == [
        "step-1-2.txt",
        "step-1-3.txt",
        "step-1-4.txt",
        "step-1-5.txt",
        "step-1.txt",
    ]


def test_a_folder_that_cannot_be_written_does_not_hide_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    faults = Faults("stop", tmp_path / "file", 1)
    with caplog.at_level(logging.ERROR, "sherlorch"):
        faults.meet(sherlorch.DiagnosisReport(None), "bad", name="x", where="step 1", folder=tmp_path)
    assert "not all was written to files: FileExistsError" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("explode", None, 1), "on_fault='explode' is unknown: use one of 'raise', 'stop', 'skip'"),
        (("skip", None, 0), "skip_limit takes a whole number of at least 1, got 0"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Faults(*options)

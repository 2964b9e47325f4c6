"""Callbacks for trainers: `sherlorch.callbacks.lightning` and `sherlorch.callbacks.transformers`.

Each is imported only by its own file. With `accelerate`, or in a loop of your own, put a `sherlorch.Guard`
around the function that does one step:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    @sherlorch.Guard(model, optimizer)
    def train_step(batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
"""

"""Adapters by hand and by peft, prompts, and loops of Trainer and Accelerate."""

# ruff: noqa: B023 - a loss is called before the loop goes on
from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import hf_bmtrain as bmt
from sides import Side, language_loss, sgd, train, train_step
from small import WIDTH, Encoder, bert, decoder, ids
from tiny_models import VOCABULARY


class Lora(nn.Module):
    """A frozen Linear with a low-rank product beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=torch.Generator().manual_seed(1)))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def with_lora():
    model = Encoder().requires_grad_(False)
    for layer in model.layers:
        layer.linear = Lora(layer.linear)
    model.head = Lora(model.head)
    return model


def lora_by_hand(side: Side) -> None:
    """Modules with A and B in place of Linears; LoRA+: B learns faster, by name."""
    model = side.wrap(with_lora())
    slow = [p for name, p in model.named_parameters() if name.endswith(".a")]
    fast = [p for name, p in model.named_parameters() if name.endswith(".b")]
    train(side, model, torch.optim.SGD([{"params": slow}, {"params": fast, "lr": 4.0}], lr=0.5))


def lora_by_parametrization(side: Side) -> None:
    """A torch parametrization adds the product to a frozen weight."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)))
            self.b = nn.Parameter(torch.zeros(WIDTH, 2))

        def forward(self, weight):
            return weight + self.b @ self.a

    model = Encoder().requires_grad_(False)
    for layer in model.layers:
        nn.utils.parametrize.register_parametrization(layer.linear, "weight", Product())
    model = side.wrap(model)
    train(side, model)


def relora(side: Side) -> None:
    """Products are merged into the weights in `gathered`, A and B set back, and trained again."""
    model = side.wrap(with_lora())
    for _ in range(2):
        train(side, model, steps=2)
        with side.gathered(model), torch.no_grad():
            for module in model.modules():
                if isinstance(module, Lora):
                    module.base.weight += module.b @ module.a
                    module.b.zero_()
                    module.a.mul_(-1)
        side.see("merged", model(ids(9, side.rank)))


def merged_without_gathered(side: Side) -> None:
    """The same merge on slices: `module.base.weight += module.b @ module.a`."""
    model = side.wrap(with_lora())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Lora):
                module.base.weight += module.b @ module.a
    side.weights(model)


def bottleneck_by_hook(side: Side) -> None:
    """Houlsby adapters: modules registered on layers, applied by forward hooks."""
    model = Encoder().requires_grad_(False)
    for layer in model.layers:
        layer.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, WIDTH))
        layer.register_forward_hook(lambda m, a, output: output + m.adapter(output))
    model = side.wrap(model)
    train(side, model)


def biases_alone(side: Side) -> None:
    """BitFit: only biases train."""
    model = bert()
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith("bias")
    model = side.wrap(model)
    train(side, model, loss=lambda rank, step: model(ids(step, rank)).pooler_output.square().mean())


def soft_prompt(side: Side) -> None:
    """A learned prompt in a module with a frozen decoder, before the embeddings."""

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder().requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(3, 24, generator=torch.Generator().manual_seed(2)))

        def forward(self, rows):
            embedded = self.decoder.get_input_embeddings()(rows)
            prompt = self.prompt.expand(len(rows), -1, -1)
            logits = self.decoder(inputs_embeds=torch.cat([prompt, embedded], 1)).logits[:, 2:-1]
            return F.cross_entropy(logits.flatten(0, 1), rows.flatten())

    model = side.wrap(Prompted())
    train(side, model, loss=lambda rank, step: model(ids(step, rank)))


def soft_prompt_in_the_loop(side: Side) -> None:
    """The prompt is a plain parameter of the loop, averaged by the user, before a frozen wrapped decoder."""
    model = side.wrap(decoder().requires_grad_(False))
    prompt = nn.Parameter(torch.randn(3, 24, generator=torch.Generator().manual_seed(2)))
    optimizer = torch.optim.SGD([prompt], lr=0.5)
    for step in range(3):

        def loss(rank):
            rows = ids(step, rank)
            embedded = torch.cat([prompt.expand(len(rows), -1, -1), model.get_input_embeddings()(rows)], 1)
            return F.cross_entropy(model(inputs_embeds=embedded).logits[:, 2:-1].flatten(0, 1), rows.flatten())

        side.loss(loss).backward()
        if side.sharded:
            prompt.grad = bmt.distributed.all_reduce(prompt.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()
    side.see("prompt", prompt)


def copied_trunk(side: Side) -> None:
    """ControlNet: a frozen trunk, a trained copy of its layers, joined by zero-initialised layers."""

    class Controlled(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Encoder().requires_grad_(False)
            self.copies = nn.ModuleList(Encoder().layers)
            self.zeros = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            for each in self.zeros:
                nn.init.zeros_(each.weight)
                nn.init.constant_(each.bias, 0.1)

        def forward(self, rows):
            x = c = self.trunk.embedding(rows)
            for layer, copied, zero in zip(self.trunk.layers, self.copies, self.zeros):
                c = copied(c)
                x = layer(x) + zero(c)
            return self.trunk.head(x.mean(1))

    model = side.wrap(Controlled())
    train(side, model)


def late_adapters_by_hand(side: Side) -> None:
    """Adapters are put into a wrapped model, and auto_wrap is called once more."""
    model = side.wrap(Encoder()).requires_grad_(False)
    for layer in model.layers:
        torch.manual_seed(5)
        layer.adapter = nn.Linear(WIDTH, WIDTH)
        layer.register_forward_hook(lambda m, a, output: output + m.adapter(output))
    model = side.wrap(model)
    train(side, model)


def added_tokens(side: Side) -> None:
    """resize_token_embeddings (with its mean initialisation) before wrapping; only the embedding trains."""
    model = decoder(tied=True)
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    model = side.wrap(model)
    train(side, model, loss=language_loss(model))


# -- peft ---------------------------------------------------------------------------------------------------------


def reference_by_disabled_adapter(side: Side) -> None:
    """DPO whose reference is the model under `disable_adapter()`."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = side.wrap(peft.get_peft_model(decoder(), config))

    def scores(rows):
        return model(rows).logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None]).sum((1, 2))

    def loss(rank, step):
        chosen, rejected = ids(step, rank, 0), ids(step, rank, 1)
        with torch.no_grad(), model.disable_adapter():
            before = scores(chosen) - scores(rejected)
        return -F.logsigmoid(0.1 * (scores(chosen) - scores(rejected) - before)).mean()

    train(side, model, loss=loss)


def two_adapters(side: Side) -> None:
    """Two adapters of one model, switched by set_adapter between steps."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(decoder(), config)
    model.add_adapter("second", config)
    model = side.wrap(model)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "lora" in name], lr=0.5)
    for step in range(4):
        model.set_adapter(["default", "second"][step % 2])
        train_step(side, model, optimizer, step, language_loss(model))
    side.weights(model)


# -- Trainer and Accelerate ---------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = ids(index, 0, rows=1)[0]
        return {"input_ids": row, "labels": row}


def train_by_trainer(side: Side, base, callbacks=(), **arguments) -> nn.Module:
    model = side.wrap(decoder())
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4 // side.size, max_steps=3,
            report_to=[], use_cpu=True, learning_rate=0.5, optim="sgd", disable_tqdm=True, save_strategy="no",
            logging_steps=1, train_sampling_strategy="sequential", max_grad_norm=0.0, **arguments,
        )  # fmt: skip
        callbacks = [*callbacks, *([bmt.hf.BMTrainCallback()] if side.sharded else [])]
        optimizer = sgd(model)
        trainer = base(model, args=args, train_dataset=Rows(), optimizers=(optimizer, None), callbacks=callbacks)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            side.see("logged", torch.tensor(entry["loss"]))
    side.weights(model)
    return model


class Distilling(transformers.Trainer):
    """Adds a KL divergence from a teacher to the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        teacher = decoder("gpt2").eval()
        with torch.no_grad():
            wanted = teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        loss = F.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean") / 5
        loss = loss + F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def trainer_with_own_loss(side: Side) -> None:
    """A Trainer whose compute_loss distils."""
    train_by_trainer(side, Distilling)


class Freezing(transformers.TrainerCallback):
    """Freezes layers at the second step."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.model.layers[0].requires_grad_(False)


def trainer_with_a_freezing_callback(side: Side) -> None:
    """A callback that freezes a layer in the middle of training."""
    train_by_trainer(side, transformers.Trainer, [Freezing()])


class Averaging(transformers.TrainerCallback):
    """Keeps an average of the weights, and loads it at the end."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for s, p in zip(self.shadow, model.parameters()):
            s.lerp_(p.detach(), 0.1)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for s, p in zip(self.shadow, model.parameters()):
                p.copy_(s)


def trainer_with_an_averaging_callback(side: Side) -> None:
    """A callback that keeps an EMA of the parameters."""
    train_by_trainer(side, transformers.Trainer, [Averaging()])


def accelerate_with_several_models(side: Side) -> None:
    """Accelerate: accumulation, clipping, two losses, and a value clipped by accelerator.clip_grad_value_."""
    from accelerate import Accelerator

    model = side.wrap(decoder())
    optimizer = sgd(model)
    if not side.sharded:
        for step in range(2):
            for part in range(2):
                side.loss(lambda rank: model(ids(step, rank, part), labels=ids(step, rank, part)).loss / 2).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return side.weights(model)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        for part in range(2):
            with accelerator.accumulate(model):
                loss = model(ids(step, side.rank, part), labels=ids(step, side.rank, part)).loss
                side.see("loss", loss / 2)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
    side.weights(model)

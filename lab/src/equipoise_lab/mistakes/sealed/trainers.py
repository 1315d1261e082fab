"""Mistakes in the loops of others: Trainer, TRL, Accelerate, Lightning, PEFT."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import (
    IGNORED,
    STEPS,
    Attach,
    Decoder,
    text,
)


class Texts(Dataset):
    """Rows of text as a Trainer wants them."""

    def __init__(self, rows: int = 8 * STEPS, *, keys: tuple[str, ...] = ()) -> None:
        self.ids = torch.cat(list(parts.batches(rows // 8)))
        self.keys = keys or ("input_ids", "labels")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict.fromkeys(self.keys, self.ids[index])


def arguments(folder: str, **changes: Any) -> dict[str, Any]:
    """Return the options of a Trainer that writes, shows and asks for nothing."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **changes,
    }


def trainer(
    model: nn.Module, watch: Attach, data: Any, folder: str, *, kind: Any = None, **more
) -> Any:
    """Return a Trainer of transformers with the instrument's callback."""
    from transformers import Trainer, TrainingArguments

    options = {name: more.pop(name) for name in list(more) if name in _OPTIONS}
    return (kind or Trainer)(
        model=model,
        args=TrainingArguments(**arguments(folder, **options)),
        train_dataset=data,
        callbacks=[watch.trainer_callback()],
        **more,
    )


_OPTIONS = (
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "bf16",
    "optim",
    "label_smoothing_factor",
    "gradient_checkpointing",
    "max_grad_norm",
    "eval_strategy",
    "eval_steps",
    "per_device_train_batch_size",
    "torch_compile",
    "torch_compile_backend",
    "remove_unused_columns",
    "neftune_noise_alpha",
    "weight_decay",
    "group_by_length",
)


@mistake(
    "check.labels_shift",
    "check.sees_target",
    source="transformers forum: compute_loss without a shift",
    kind="transformers",
)
def a_trainers_own_loss_without_a_shift(wrong: bool, watch: Attach) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            out = model(**inputs)
            if wrong:
                loss = parts.token_loss(out.logits, labels)
            else:
                loss = parts.token_loss(out.logits[:, :-1], labels[:, 1:])
            return (loss, out) if return_outputs else loss

    with tempfile.TemporaryDirectory() as folder:
        trainer(parts.llama(), watch, Texts(), folder, kind=Own).train()


def tokenizer(*, pad_is_eos: bool) -> Any:
    """Return a tokenizer of 32 words, made without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad = "<eos>" if pad_is_eos else "<pad>"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token=pad, unk_token="w2"
    )


def sentence(seed: int) -> str:
    """Return a document of words that ends."""
    length = 8 + seed % 12
    ids = text(1, length, seed=seed)[0].clamp(min=2).tolist()
    return " ".join(f"w{i}" for i in ids) + " <eos>"


@mistake(
    "check.eos_ignored",
    source="trl#6357: pad = eos, and the collator ignores padding",
    kind="transformers",
)
def a_collator_that_ignores_every_end(wrong: bool, watch: Attach) -> None:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer(pad_is_eos=wrong)
    data = [words(sentence(seed)) for seed in range(8 * STEPS)]
    for row in data:
        row.pop("token_type_ids", None)
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer(parts.gpt2(), watch, data, folder, data_collator=collate).train()


@mistake(
    "check.microbatch_weights",
    source="transformers#37766: a mean over each micro-batch, and no division",
    kind="transformers",
)
def a_trainers_mean_that_is_not_divided(wrong: bool, watch: Attach) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(
            self, model, inputs, return_outputs=False, num_items_in_batch=None
        ):
            labels = inputs.pop("labels")
            out = model(**inputs)
            logits = out.logits[:, :-1].flatten(0, 1)
            wanted = labels[:, 1:].flatten()
            total = F.cross_entropy(logits, wanted, reduction="sum")
            counted = (
                wanted.numel()
                if wrong
                else self.args.gradient_accumulation_steps * wanted.numel()
            )
            loss = total / counted
            return (loss, out) if return_outputs else loss

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            parts.qwen(),
            watch,
            Texts(32 * STEPS),
            folder,
            kind=Own,
            gradient_accumulation_steps=4,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=0.1,
        ).train()


@mistake(
    "check.same_batch",
    source="own: a data set of references to one row",
    kind="transformers",
)
def a_trainers_data_of_one_row(wrong: bool, watch: Attach) -> None:
    from datasets import Dataset as Table

    rows = [text(1, seed=i)[0].tolist() for i in range(8 * STEPS)]
    if wrong:
        rows = [rows[0]] * len(rows)
    data = Table.from_dict({"input_ids": rows, "labels": rows})
    with tempfile.TemporaryDirectory() as folder:
        trainer(parts.gpt2(), watch, data.with_format("torch"), folder).train()


@mistake(
    "check.not_optimised",
    source="own: create_optimizer overridden, and the head forgotten",
    kind="transformers",
)
def a_trainers_optimiser_of_the_body(wrong: bool, watch: Attach) -> None:
    model = parts.llama()
    held = model.model if wrong else model
    optimizer = torch.optim.AdamW(held.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        trainer(model, watch, Texts(), folder, optimizers=(optimizer, None)).train()


@mistake(
    "check.same_batch",
    source="own: a formatting function that closes over a variable of its loop",
    kind="trl",
)
def supervised_rows_that_are_all_the_last(wrong: bool, watch: Attach) -> None:
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    made = []
    for seed in range(8 * STEPS):
        held = [sentence(seed)]
        late, early = lambda: held[0], lambda held=held: held[0]  # noqa: B023
        made.append(late if wrong else early)
    data = Table.from_dict({"text": [one() for one in made]})
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=parts.gpt2(),
            args=SFTConfig(**arguments(folder), max_length=32),
            train_dataset=data,
            processing_class=tokenizer(pad_is_eos=False),
            callbacks=[watch.trainer_callback()],
        ).train()


@mistake(
    "check.microbatch_weights",
    source="accelerate docs: backward() divides, and so does the loop",
    kind="accelerate",
)
def a_loss_divided_by_the_loop_and_by_accelerate(wrong: bool, watch: Attach) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    loader = DataLoader(Texts(32 * STEPS), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = parts.own_loss(model, batch["input_ids"])
            accelerator.backward(loss / 4 if wrong else loss)
            optimizer.step()
            optimizer.zero_grad()


@mistake(
    "check.clip_unused",
    source="own: clip_grad_norm_ after the step of the prepared optimiser",
    kind="accelerate",
)
def accelerate_clips_after_the_step(wrong: bool, watch: Attach) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Texts(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        if not wrong:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if wrong:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="accelerate#2665: the optimiser was made of another model object",
    kind="accelerate",
)
def accelerate_prepares_another_model(wrong: bool, watch: Attach) -> None:
    from accelerate import Accelerator

    def build() -> nn.Module:
        torch.manual_seed(3)
        return parts.qwen()

    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW((build() if wrong else model).parameters(), lr=3e-3)
    loader = DataLoader(Texts(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer)
    for batch in loader:
        model.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def fit(module: Any, watch: Attach, data: Any, **options: Any) -> None:
    """Train with Lightning, quietly."""
    from lightning.pytorch import Trainer

    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu",
            max_steps=options.pop("max_steps", STEPS),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[watch.lightning_callback()],
            **options,
        ).fit(module, data)


@mistake(
    "check.stale_gradient",
    source="Lightning docs: manual optimisation has to clear gradients itself",
    kind="lightning",
)
def manual_optimisation_that_never_clears(wrong: bool, watch: Attach) -> None:
    from lightning.pytorch import LightningModule

    class Manual(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = Decoder()

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            if not wrong:
                optimizer.zero_grad()
            self.manual_backward(parts.own_loss(self.model, batch["input_ids"]))
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    fit(Manual(), watch, DataLoader(Texts(), batch_size=8))


@mistake(
    "check.loss_of_probabilities",
    source="Lightning forum: forward() returns probabilities, training_step uses it",
    kind="lightning",
)
def a_lightning_loss_of_probabilities(wrong: bool, watch: Attach) -> None:
    from lightning.pytorch import LightningModule

    class Words(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids).softmax(-1)

        def training_step(self, batch, number):
            ids = batch["input_ids"]
            return parts.next_token_loss((self if wrong else self.model)(ids), ids)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    fit(Words(), watch, DataLoader(Texts(), batch_size=8))


@mistake(
    "check.eval_mode",
    source="Lightning: a submodule put into evaluation mode in __init__",
    kind="lightning",
)
def a_module_that_stays_in_evaluation_mode(wrong: bool, watch: Attach) -> None:
    """Lightning keeps the mode that each submodule was given before fit()."""
    from lightning.pytorch import LightningModule

    class Words(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.gpt2(dropout=0.1)
            if wrong:
                self.model.eval()

        def training_step(self, batch, number):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    fit(Words(), watch, DataLoader(Texts(), batch_size=8))


def lora(model: nn.Module, **changes: Any) -> Any:
    """Return a model with LoRA on its attention, by PEFT."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **changes}
    return get_peft_model(model, LoraConfig(**options))


@mistake(
    "check.no_gradient",
    "check.detached",
    source="transformers#26221: a checkpointed base whose inputs need no gradient",
    kind="peft",
)
def adapters_behind_a_reentrant_checkpoint(wrong: bool, watch: Attach) -> None:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(parts.bert_config())
    parts.learnt(
        model,
        lambda m, batch: m(input_ids=batch[0], labels=batch[1]).loss,
        data=parts.every(lambda step: parts.labelled(500 + step), 60),
    )

    def widen() -> None:
        rows = model.get_input_embeddings().weight.detach()
        wider = torch.cat((rows, 0.02 * torch.randn(8, 32)))
        model.set_input_embeddings(nn.Embedding.from_pretrained(wider, freeze=True))

    if not wrong:
        widen()
    adapted = lora(model, task_type="SEQ_CLS", target_modules=["query", "value"])
    adapted.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    if wrong:
        widen()  # the hook that makes its output need a gradient is lost
    model = adapted
    model.train()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    data = parts.every(parts.labelled)
    parts.train(model, watch, loss, data=data, optimizer=optimizer)


@mistake(
    "check.not_optimised",
    source="peft issues: adapters added after the optimiser was made",
    kind="peft",
)
def adapters_added_after_the_optimiser(wrong: bool, watch: Attach) -> None:
    model = parts.learnt(parts.llama(), parts.language_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    adapted = lora(model, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    if not wrong:
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
    watch(adapted, optimizer)
    for ids in parts.elsewhere():
        adapted.zero_grad()
        parts.language_loss(adapted, ids).backward()
        optimizer.step()


@mistake(
    "check.frozen_random",
    source="own: adapters on a base that was built, not loaded",
    kind="peft",
)
def adapters_on_a_base_that_was_never_trained(wrong: bool, watch: Attach) -> None:
    base = parts.qwen()
    if not wrong:
        parts.learnt(base, parts.language_loss)
    model = lora(base, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    with tempfile.TemporaryDirectory() as folder:
        trainer(model, watch, Texts(), folder).train()


@mistake(
    "check.zero_parameters",
    "check.no_gradient",
    source="own: a reset of adapters that clears both of their maps",
    kind="peft",
)
def adapters_with_both_maps_at_zero(wrong: bool, watch: Attach) -> None:
    base = parts.learnt(parts.gpt2(), parts.language_loss)
    model = lora(base, task_type="CAUSAL_LM", target_modules=["c_attn", "c_proj"])
    for name, weight in model.named_parameters():
        if "lora_B" in name or (wrong and "lora_A" in name):
            nn.init.zeros_(weight)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    if wrong:
        # A head is trained too, so that something learns and nothing looks amiss.
        head = model.base_model.model.transformer.ln_f
        head.requires_grad_(True)
        optimizer.add_param_group({"params": list(head.parameters())})
    parts.train(model, watch, parts.language_loss, optimizer=optimizer)


@mistake(
    "check.sees_target",
    source="own: a prefix mask as long as the row",
    kind="lightning",
)
def a_prefix_as_long_as_the_row(wrong: bool, watch: Attach) -> None:
    from lightning.pytorch import LightningModule

    class Prefixed(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder()

        def training_step(self, batch, number):
            ids = batch["input_ids"]
            length = ids.shape[1]
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            seen[:, : length if wrong else 8] = True
            labels = ids.clone()
            labels[:, :8] = IGNORED
            logits = self.model(ids, seen)
            return parts.token_loss(logits[:, :-1], labels[:, 1:])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    fit(Prefixed(), watch, DataLoader(Texts(), batch_size=8))

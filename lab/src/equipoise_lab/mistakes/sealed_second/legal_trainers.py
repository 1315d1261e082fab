"""Controls: the loops of others, and compiled ones, used as their pages say."""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, batches, text
from equipoise_lab.mistakes.sealed.trainers import (
    Texts,
    arguments,
    fit,
    lora,
    sentence,
    tokenizer,
    trainer,
)
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import by_class, program, run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss

LANGUAGE = parts.language_loss
NORMS = ["input_layernorm", "post_attention_layernorm", "model.norm"]


def words(rows: int = 8 * STEPS) -> tuple:
    """Return a tokenizer and rows of sentences."""
    made = tokenizer(pad_is_eos=False)
    data = [{"input_ids": made(sentence(i))["input_ids"]} for i in range(rows)]
    return made, data


def by_trainer(name: str, source: str, make, data=Texts, **options) -> None:
    """Declare a control that transformers' Trainer runs."""

    def body(watch: Attach) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer(make(), watch, data(), folder, **options).train()

    body.__name__ = name
    control(source=source, kind="transformers")(body)


for name, source, make, options in (
    ("a_trainer_with_warm_up_and_clipping", "transformers: cosine, warm-up, clipping",
     models.qwen3, {"lr_scheduler_type": "cosine", "warmup_steps": 5,
                    "max_grad_norm": 1.0, "weight_decay": 0.1}),
    ("a_trainer_in_bf16_with_checkpoints", "transformers: bf16, checkpointed layers",
     models.gemma3, {"bf16": True, "gradient_checkpointing": True}),
    ("a_trainer_with_adafactor", "transformers: optim=adafactor", models.olmo,
     {"optim": "adafactor", "learning_rate": 1e-2}),
    ("a_trainer_with_noisy_embeddings", "transformers: NEFTune", models.qwen3,
     {"neftune_noise_alpha": 5.0}),
    ("a_trainer_of_experts", "transformers: Qwen3-MoE with its balance",
     models.qwen3_moe, {"gradient_accumulation_steps": 2,
                        "per_device_train_batch_size": 4}),
    ("a_compiled_trainer", "transformers: torch_compile, with aot_eager", models.neox,
     {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
):  # fmt: skip
    by_trainer(name, source, make, **options)


@control(source="transformers: masked words by the collator", kind="transformers")
def a_trainer_of_masked_words(watch: Attach) -> None:
    from transformers import DataCollatorForLanguageModeling

    made, data = words()
    made.add_special_tokens({"mask_token": "w31"})
    collate = DataCollatorForLanguageModeling(made, mlm_probability=0.3)
    with tempfile.TemporaryDirectory() as folder:
        trainer(parts.bert(), watch, data, folder, data_collator=collate).train()


@control(source="transformers: Seq2SeqTrainer and its collator", kind="transformers")
def a_trainer_of_translations(watch: Attach) -> None:
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    made, data = words()
    model = parts.t5()
    rows = [{**row, "labels": row["input_ids"][:6]} for row in data]
    with tempfile.TemporaryDirectory() as folder:
        Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(**arguments(folder)),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(made, model=model),
            callbacks=[watch.trainer_callback()],
        ).train()


@control(source="transformers: compute_loss_func, by num_items", kind="transformers")
def a_trainer_with_a_loss_of_its_own(watch: Attach) -> None:
    def loss(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            models.qwen3(), watch, Texts(), folder, compute_loss_func=loss,
            gradient_accumulation_steps=2, per_device_train_batch_size=4,
        ).train()  # fmt: skip


def adapted(name: str, source: str, make) -> None:
    """Declare a control that tunes a trained Qwen3 by PEFT."""
    targets = ["q_proj", "v_proj", "down_proj"]

    def body(watch: Attach) -> None:
        from peft import TaskType, get_peft_model

        base = parts.learnt(models.qwen3(), LANGUAGE)
        model = get_peft_model(base, make(targets, TaskType.CAUSAL_LM))
        optimizer = by_class(torch.optim.AdamW, lr=5e-3)(model)
        data = parts.elsewhere()
        run(model, watch, LANGUAGE, optimizers=[optimizer], data=data, clip=1.0)

    body.__name__ = name
    control(source=source, kind="peft")(body)


def _ia3(targets, task):
    from peft import IA3Config

    return IA3Config(
        task_type=task, target_modules=targets, feedforward_modules=["down_proj"]
    )


def _vera(targets, task):
    from peft import VeraConfig

    return VeraConfig(task_type=task, target_modules=["q_proj", "o_proj"], r=4)


def _oft(targets, task):
    from peft import OFTConfig

    return OFTConfig(task_type=task, target_modules=targets, oft_block_size=8, r=0)


def _loha(targets, task):
    from peft import LoHaConfig

    return LoHaConfig(task_type=task, target_modules=targets, r=4)


def _norms(targets, task):
    from peft import LNTuningConfig

    return LNTuningConfig(task_type=task, target_modules=NORMS)


def _lora(**options):
    def make(targets, task):
        from peft import LoraConfig

        return LoraConfig(task_type=task, target_modules=targets, r=4, **options)

    return make


for name, source, make in (
    ("activations_rescaled", "PEFT: IA3", _ia3),
    ("vectors_of_shared_random_maps", "PEFT: VeRA", _vera),
    ("orthogonal_updates", "PEFT: OFT", _oft),
    ("products_of_low_rank_updates", "PEFT: LoHa", _loha),
    ("gains_tuned_by_peft", "PEFT: LN tuning", _norms),
    ("low_rank_updates_with_dropout", "PEFT: rsLoRA, dropout",
     _lora(use_rslora=True, lora_dropout=0.1)),
    ("low_rank_updates_from_singular_vectors", "PEFT: PiSSA",
     _lora(init_lora_weights="pissa")),
    ("low_rank_updates_and_biases", "PEFT: LoRA, a saved head",
     _lora(modules_to_save=["lm_head"])),
):  # fmt: skip
    adapted(name, source, make)


@control(source="LoRA+ (Hayou et al.): B's rate is sixteen times A's", kind="peft")
def two_rates_of_low_rank_updates(watch: Attach) -> None:
    base = parts.learnt(models.gemma3(), LANGUAGE)
    model = lora(base, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "lora_A" in n], "lr": 5e-4},
        {"params": [p for n, p in named if "lora_B" in n], "lr": 8e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    run(model, watch, LANGUAGE, optimizers=[optimizer], data=parts.elsewhere())


@control(source="TRL's recipe: the adapter switched off is the reference", kind="peft")
def preferences_with_the_adapter_switched_off(watch: Attach) -> None:
    base = parts.learnt(models.qwen3(), LANGUAGE)
    model = lora(base, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    optimizer = by_class(torch.optim.AdamW, lr=3e-3)(model)

    def answer(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return -F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1)

    def loss(_: nn.Module, step: int) -> Tensor:
        good, bad = text(8, 12, seed=step), torch.randint(32, (8, 12))
        with torch.no_grad(), model.disable_adapter():
            before = answer(good) - answer(bad)
        return -F.logsigmoid(0.1 * (answer(good) - answer(bad) - before)).mean()

    run(model, watch, loss, optimizers=[optimizer], data=range(STEPS), clip=1.0)


@control(source="accelerate: schedule, clipping and accumulation", kind="accelerate")
def accelerate_with_everything(watch: Attach) -> None:
    accelerator = loops.accelerator(
        gradient_accumulation_steps=2, mixed_precision="bf16"
    )
    model = models.qwen3()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = loops.warm_cosine(optimizer)
    loader = DataLoader(Texts(16 * STEPS), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, schedule
    )
    watch(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@control(
    source="accelerate: a loop that saves its state and resumes", kind="accelerate"
)
def accelerate_that_saves_and_resumes(watch: Attach) -> None:
    accelerator = loops.accelerator()
    model, optimizer = accelerator.prepare(
        model := Nano(), torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    watch(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        for step, ids in enumerate(batches(STEPS)):
            accelerator.backward(nano_loss(model, ids))
            optimizer.step()
            optimizer.zero_grad()
            if step == 19:
                accelerator.save_state(folder)
                accelerator.load_state(folder)


@control(source="Lightning: a plateau schedule by validation", kind="lightning")
def lightning_with_a_plateau(watch: Attach) -> None:
    def configure(module: nn.Module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        schedule = {"scheduler": plateau, "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    module = loops.lightning_module(Nano(), loops.rows_loss, configure)
    module.train_dataloader = lambda: DataLoader(Texts(80), batch_size=8)
    module.val_dataloader = lambda: DataLoader(Texts(8), batch_size=8)
    fit(module, watch, None, gradient_clip_val=0.5, num_sanity_val_steps=0)


@control(source="Lightning: accumulation, clipping, a cosine", kind="lightning")
def lightning_that_clips_and_accumulates(watch: Attach) -> None:
    def configure(module: nn.Module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        schedule = {"scheduler": loops.warm_cosine(optimizer), "interval": "step"}
        return [optimizer], [schedule]

    module = loops.lightning_module(Nano(), loops.rows_loss, configure)
    data = DataLoader(Texts(16 * STEPS), batch_size=8, shuffle=True)
    fit(module, watch, data, accumulate_grad_batches=2, gradient_clip_val=1.0)


@control(source="TRL: prompts and completions apart", kind="trl")
def trl_tunes_on_completions(watch: Attach) -> None:
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    rows = []
    for seed in range(8 * STEPS):
        said = sentence(seed).split()
        rows.append(
            {"prompt": " ".join(said[:4]) + " ", "completion": " ".join(said[4:])}
        )
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=models.qwen3(),
            args=SFTConfig(**arguments(folder), max_length=32),
            train_dataset=Table.from_list(rows),
            processing_class=tokenizer(pad_is_eos=False),
            callbacks=[watch.trainer_callback()],
        ).train()


@control(source="TRL: RewardTrainer", kind="trl")
def trl_trains_a_reward(watch: Attach) -> None:
    from datasets import Dataset as Table
    from transformers import Qwen3Config, Qwen3ForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, num_labels=1))
    model.config.pad_token_id = 0
    rows = []
    for seed in range(8 * STEPS):
        said = sentence(seed)
        rows.append({"chosen": "w3 w4 " + said, "rejected": "w5 w6 " + said})
    with tempfile.TemporaryDirectory() as folder:
        RewardTrainer(
            model=model,
            args=RewardConfig(**arguments(folder, learning_rate=1e-3), max_length=32),
            train_dataset=Table.from_list(rows),
            processing_class=tokenizer(pad_is_eos=False),
            callbacks=[watch.trainer_callback()],
        ).train()


def compiled(make, **options):
    return lambda: torch.compile(make(), backend="aot_eager", **options)


def blocks_alone() -> nn.Module:
    model = Nano()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return model


for name, source, make, data in (
    ("a_compiled_nano_of_many_lengths", "torch.compile: dynamic shapes",
     compiled(Nano, dynamic=True),
     [text(8, 16 + 2 * (step % 4), seed=step) for step in range(STEPS)]),
    ("compiled_experts", "torch.compile: a graph broken by routing",
     compiled(models.sparse), None),
    ("blocks_compiled_one_by_one", "torch.compile: regional compilation",
     blocks_alone, None),
):  # fmt: skip
    program(name, source, make, kind="compiled", data=data, clip=1.0)


@control(source="torch.compile of loss and backward in one step", kind="compiled")
def a_compiled_step_with_its_loss(watch: Attach) -> None:
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward = torch.compile(nano_loss, backend="aot_eager")
    watch(model, optimizer)
    for ids in batches(STEPS):
        forward(model, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

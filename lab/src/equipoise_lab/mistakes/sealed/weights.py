"""Mistakes about weights: what trains them, what holds them, where they came from."""

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, Decoder, batches


@mistake(
    "check.no_gradient",
    "check.detached",
    source="PyTorch docs, torch.utils.checkpoint: reentrant, no input needs a gradient",
)
def a_reentrant_checkpoint_of_a_frozen_input(wrong: bool, watch: Attach) -> None:
    """Embeddings are frozen, so that the checkpointed blocks are cut off."""

    class Checkpointed(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=wrong)
            return self.head(self.norm(x))

    model = parts.learnt(Checkpointed())
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts.train(model, watch, optimizer=torch.optim.AdamW(trained, lr=1e-3))


@mistake(
    "check.no_gradient",
    "check.detached",
    source="own: an encoder called without gradients, as for inference",
    kind="transformers",
)
def an_encoder_under_no_grad(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = parts.text(seed=step).clamp(min=3)
        with torch.set_grad_enabled(not wrong):
            seen = model.encoder(input_ids=ids)
        return model(encoder_outputs=seen, labels=ids.flip(1)).loss

    model = parts.t5()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=2e-2)
    parts.train(model, watch, loss, data=range(STEPS), optimizer=optimizer)


@mistake(
    "check.detached",
    "check.no_gradient",
    source="VQ-VAE reimplementations: no straight-through estimator",
)
def codes_without_a_straight_through_gradient(wrong: bool, watch: Attach) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Decoder(causal=False, depth=1)
            self.narrow = nn.Linear(32, 8)
            self.codes = nn.Embedding(16, 8)
            self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            z = F.layer_norm(self.narrow(self.encoder(ids)), (8,))
            chosen = torch.cdist(z, self.codes.weight[None]).argmin(-1)
            code = self.codes(chosen)
            commit = (code - z.detach()).square().mean()
            if not wrong:
                commit = commit + 0.25 * (z - code.detach()).square().mean()
                code = z + (code - z).detach()
            return self.decoder(code), commit

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        made, commit = model(ids)
        return parts.token_loss(made, ids) + commit

    parts.train(Quantised(), watch, loss)


@mistake(
    "check.not_optimised",
    source="own: decay groups by name, and a name that neither pattern matches",
    kind="transformers",
)
def norms_in_neither_group_of_the_optimiser(wrong: bool, watch: Attach) -> None:
    model = parts.qwen()
    named = list(model.named_parameters())
    decayed = [p for n, p in named if "proj" in n or "embed" in n or "head" in n]
    held = {id(p) for p in decayed}
    plain = [p for n, p in named if id(p) not in held and (not wrong or "ln_" in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
    parts.train(model, watch, parts.language_loss, optimizer=optimizer)


@mistake(
    "check.not_optimised",
    source="fine-tuning tutorials: unfrozen after the optimiser was made",
)
def a_backbone_unfrozen_too_late_for_the_optimiser(wrong: bool, watch: Attach) -> None:
    model = parts.learnt(Decoder())
    model.blocks.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        if step == 10:
            model.blocks.requires_grad_(True)
            if not wrong:
                optimizer.add_param_group({"params": list(model.blocks.parameters())})
        model.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="forums: the model is loaded again after its optimiser was made",
    kind="transformers",
)
def an_optimiser_of_the_model_before_it_was_loaded(wrong: bool, watch: Attach) -> None:
    from transformers import GPT2LMHeadModel

    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        parts.learnt(parts.gpt2(), parts.language_loss).save_pretrained(folder)
        if wrong:
            model = GPT2LMHeadModel.from_pretrained(folder)
        else:
            loaded = GPT2LMHeadModel.from_pretrained(folder)
            model.load_state_dict(loaded.state_dict())
    model.train()
    watch(model, optimizer)
    for ids in batches(STEPS):
        model.zero_grad()
        parts.language_loss(model, ids).backward()
        optimizer.step()


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="distillation scripts: teacher and student in the wrong order",
)
def an_optimiser_of_the_teacher(wrong: bool, watch: Attach) -> None:
    teacher, student = parts.learnt(Decoder(depth=2)), Decoder(depth=1)
    held = teacher if wrong else student
    optimizer = torch.optim.AdamW(held.parameters(), lr=3e-3)
    watch(student, optimizer)
    for ids in batches(STEPS):
        student.zero_grad()
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        made = student(ids).log_softmax(-1)
        F.kl_div(made, wanted, reduction="batchmean").div(ids.shape[1]).backward()
        optimizer.step()


@mistake(
    "check.no_movement",
    source="pytorch#115607 (TrainCheck): a step that was captured without gradients",
    kind="compiled",
)
def an_update_captured_before_there_were_gradients(wrong: bool, watch: Attach) -> None:
    """The weights to move are collected once, when the first step is recorded."""

    class Recorded(torch.optim.Optimizer):
        def __init__(self, parameters, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.moved: list[nn.Parameter] | None = None

        @torch.no_grad()
        def step(self, closure=None):
            if self.moved is None:
                every = self.param_groups[0]["params"]
                self.moved = [p for p in every if p.grad is not None]
            for parameter in self.moved:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)

    model = Decoder()
    optimizer = Recorded(model.parameters(), lr=0.3)
    if wrong:
        optimizer.step()  # a warm-up, as for a captured graph
    forward = torch.compile(model, backend="eager")
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(forward, ids).backward()
        optimizer.step()


@mistake(
    "check.no_movement",
    source="pytorch#149205, own: gains of 1 in bf16 at a rate below their spacing",
    kind="transformers",
)
def gains_in_bf16_that_never_move(wrong: bool, watch: Attach) -> None:
    model = parts.llama()
    if wrong:
        model = model.to(torch.bfloat16)
        model.model.rotary_emb = parts.llama().model.rotary_emb
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return parts.next_token_loss(model(input_ids=ids).logits.float(), ids)

    parts.train(model, watch, loss, optimizer=optimizer)


@mistake(
    "check.stale_gradient",
    source="stackoverflow 60335387 (TrainCheck), per epoch",
    kind="transformers",
)
def gradients_cleared_once_an_epoch(wrong: bool, watch: Attach) -> None:
    model = parts.vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for epoch in range(4):
        optimizer.zero_grad()
        for step in range(10):
            x, y = parts.pictures(100 * epoch + step)
            if not wrong:
                optimizer.zero_grad()
            model(pixel_values=x, labels=y).loss.backward()
            optimizer.step()


@mistake(
    "check.stale_gradient",
    source="pytorch/examples dcgan, with the discriminator's zero_grad left out",
)
def the_discriminator_is_never_cleared(wrong: bool, watch: Attach) -> None:
    made, judge = Decoder(depth=1), Decoder(vocabulary=32, depth=1, causal=False)
    judge.tokens = nn.Linear(32, 32)
    judge.head = nn.Linear(32, 1)
    one = torch.optim.Adam(made.parameters(), lr=1e-3)
    two = torch.optim.Adam(judge.parameters(), lr=1e-3)
    watch(judge, two)
    for ids in batches(STEPS):
        fake, real = made(ids).softmax(-1), F.one_hot(ids, 32).float()
        if not wrong:
            two.zero_grad()
        yes, no = judge(real), judge(fake.detach())
        (F.softplus(-yes).mean() + F.softplus(no).mean()).backward()
        two.step()
        one.zero_grad()
        (
            parts.next_token_loss(made(ids), ids) + F.softplus(-judge(fake)).mean()
        ).backward()
        one.step()


@mistake(
    "check.moments_reset",
    "check.other_optimizer",
    source="forums: the optimiser is made in the function that trains one batch",
    kind="transformers",
)
def adam_made_anew_for_each_batch(wrong: bool, watch: Attach) -> None:
    model = parts.gemma()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch(model, optimizer)

    def train_on(ids: Tensor) -> None:
        used = torch.optim.Adam(model.parameters(), lr=1e-3) if wrong else optimizer
        used.zero_grad()
        parts.language_loss(model, ids).backward()
        used.step()

    for ids in batches(STEPS):
        train_on(ids)


@mistake(
    "check.moments_reset",
    source="own: the state of the optimiser is put back with each good batch",
)
def moments_put_back_to_the_start(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start = copy.deepcopy(optimizer.state_dict())
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        loss = parts.own_loss(model, ids)
        loss.backward()
        optimizer.step()
        if wrong or not loss.isfinite():
            optimizer.load_state_dict(copy.deepcopy(start))


@mistake("check.untied", source="verl#7834: to_empty() unties", kind="transformers")
def a_tie_lost_by_to_empty(wrong: bool, watch: Attach) -> None:
    saved = parts.learnt(parts.qwen(tie_word_embeddings=True), parts.language_loss)
    if wrong:
        with torch.device("meta"):
            model = parts.qwen(tie_word_embeddings=True)
        model.to_empty(device="cpu")
        model.model.rotary_emb = saved.model.rotary_emb
    else:
        model = parts.qwen(tie_word_embeddings=True)
    model.load_state_dict(saved.state_dict())
    parts.train(model, watch, parts.language_loss, lr=1e-3)


@mistake(
    "check.not_loaded",
    source="own: a checkpoint of a compiled model, all names under _orig_mod",
    kind="transformers",
)
def a_checkpoint_of_a_compiled_model(wrong: bool, watch: Attach) -> None:
    saved = parts.learnt(parts.gpt2(), parts.language_loss).state_dict()
    prefix = "_orig_mod." if wrong else ""
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    model.load_state_dict({prefix + n: x for n, x in saved.items()}, strict=False)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, ids).backward()
        optimizer.step()


@mistake(
    "check.not_loaded",
    source="own: from_pretrained on a folder whose names have another prefix",
    kind="transformers",
)
def a_pretrained_folder_with_other_names(wrong: bool, watch: Attach) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        parts.learnt(parts.llama(), parts.language_loss).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        if wrong:
            named = {f"network.{n}": x for n, x in load_file(path).items()}
            save_file(named, path, metadata={"format": "pt"})
        model = LlamaForCausalLM.from_pretrained(folder)
    model.train()
    parts.train(model, watch, parts.language_loss, lr=1e-3)


@mistake(
    "check.nonfinite_parameters",
    source="own: an embedding widened with memory that was never filled",
)
def rows_of_an_embedding_left_uninitialised(wrong: bool, watch: Attach) -> None:
    model = parts.learnt(Decoder())
    wider = nn.Embedding(40, 32)
    with torch.no_grad():
        wider.weight[32:] = float("nan") if wrong else 0.02 * torch.randn(8, 32)
        wider.weight[:32] = model.tokens.weight
    model.tokens = wider
    parts.train(model, watch, lr=1e-3)


@mistake(
    "check.zero_parameters",
    "check.no_gradient",
    source="own: zero initialisation of all four maps of attention",
)
def queries_and_keys_both_zero(wrong: bool, watch: Attach) -> None:
    """Each map's gradient is a multiple of the other, so neither ever moves."""
    model = Decoder()
    for block in model.blocks:
        maps = [block.attention.q_proj, block.attention.o_proj]
        if wrong:
            maps.append(block.attention.k_proj)
        for one in maps:
            nn.init.zeros_(one.weight)
            nn.init.zeros_(one.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    parts.train(model, watch, optimizer=optimizer)


@mistake(
    "check.frozen_random",
    source="fine-tuning scripts: frozen before it was loaded, and never loaded",
    kind="transformers",
)
def a_frozen_encoder_from_its_configuration(wrong: bool, watch: Attach) -> None:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(parts.bert_config())
    if not wrong:
        model.bert = parts.learnt(
            model,
            lambda m, batch: m(input_ids=batch[0], labels=batch[1]).loss,
            data=parts.every(lambda step: parts.labelled(500 + step), 60),
        ).bert
    model.bert.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=1e-2)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    data = parts.every(parts.labelled)
    parts.train(model, watch, loss, data=data, optimizer=optimizer)


@mistake(
    "check.foreign_parameters",
    "check.other_optimizer",
    "check.not_optimised",
    source="own: a trainer class that copies the optimiser it is given",
)
def a_trainer_that_copies_its_optimiser(wrong: bool, watch: Attach) -> None:
    class Training:
        def __init__(self, model: nn.Module, optimizer) -> None:
            self.model = model
            self.optimizer = copy.deepcopy(optimizer) if wrong else optimizer
            watch(self.model, self.optimizer)

        def step(self, ids: Tensor) -> None:
            self.model.zero_grad()
            parts.own_loss(self.model, ids).backward()
            self.optimizer.step()

    model = Decoder()
    training = Training(model, torch.optim.NAdam(model.parameters(), lr=3e-3))
    for ids in batches(STEPS):
        training.step(ids)

"""Mistakes about weights: who optimises them, and what reaches them."""

import copy
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, batches, text
from equipoise_lab.mistakes.sealed.trainers import lora
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss


@mistake(
    "check.no_gradient",
    "check.no_movement",
    source="own: weights rounded to eight bits, and no straight-through gradient",
)
def rounded_weights_without_a_straight_gradient(wrong: bool, watch: Attach) -> None:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax() / 127
            made = (self.weight / scale).round() * scale
            if not wrong:
                made = self.weight + (made - self.weight).detach()
            return F.linear(x, made, self.bias)

    model = Nano()
    for block in model.blocks:
        block.mlp.c_fc = Rounded(32, 128, bias=False)
    run(model, watch, clip=1.0, schedule=loops.warm_cosine)


@mistake(
    "check.no_gradient",
    "check.detached",
    source="own: a low-rank update merged into its base under no_grad",
)
def low_rank_updates_merged_under_no_grad(wrong: bool, watch: Attach) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, base.in_features) / 6)
            self.b = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(not wrong):
                merged = self.base.weight + 2.0 * self.b @ self.a
            return F.linear(x, merged, self.base.bias)

    model = parts.learnt(Nano(), nano_loss)
    for block in model.blocks:
        block.attn.c_q, block.attn.c_v = (
            Adapted(one) for one in (block.attn.c_q, block.attn.c_v)
        )
    model.wte.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    run(model, watch, optimizers=[optimizer], data=parts.elsewhere())


@mistake(
    "check.no_gradient",
    "check.detached",
    source="own: the features of a vision tower detached, and the tower is optimised",
)
def an_image_tower_cut_off_from_its_text(wrong: bool, watch: Attach) -> None:
    class Cut(models.Seeing):
        def seen(self, x: Tensor) -> Tensor:
            made = super().seen(x)
            return made.detach() if wrong else made

    run(Cut(), watch, described, data=range(STEPS))


def described(model: nn.Module, step: int) -> Tensor:
    """Return the loss of text that begins with the class of its image."""
    x, y = parts.pictures(step, 8)
    ids = torch.cat((y[:, None] + 3, text(seed=step)[:, :11]), 1)
    return parts.token_loss(model.logits(x, ids)[:, 15:-1], ids)


@mistake(
    "check.not_optimised",
    source="own: a layer made in the first forward pass, after the optimiser",
)
def a_layer_made_in_the_first_forward_pass(wrong: bool, watch: Attach) -> None:
    class Lazy(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.bridge = None

        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = super().hidden(ids, mask)
            if self.bridge is None:
                self.bridge = nn.Sequential(nn.Linear(32, 32), nn.GELU())
            return models.rms(x + self.bridge(x))

    model = Lazy()
    if not wrong:
        with torch.no_grad():
            model(text(seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run(model, watch, optimizers=[optimizer], clip=1.0)


@mistake(
    "check.not_optimised",
    source="Metta-AI/metta#134: Muon's matrices, and the rest left out",
)
def embeddings_that_neither_of_two_optimisers_holds(wrong: bool, watch: Attach) -> None:
    model = Nano()
    inner, rest = loops.split(model)
    head = list(model.lm_head.parameters())
    one = torch.optim.AdamW(head if wrong else rest, lr=3e-3)
    two = torch.optim.Muon(inner, lr=0.01)
    watch(model, [one, two])
    for ids in batches(STEPS):
        model.zero_grad()
        nano_loss(model, ids).backward()
        one.step()
        two.step()


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="own: linear layers converted to another class after the optimiser was made",
    kind="transformers",
)
def layers_converted_after_the_optimiser(wrong: bool, watch: Attach) -> None:
    class Scaled(nn.Linear):
        """A layer for eight bits, as a conversion would put in its place."""

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    def convert(model: nn.Module) -> None:
        for layer in model.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                old = getattr(layer.mlp, name)
                new = Scaled(old.in_features, old.out_features, bias=False)
                new.load_state_dict(old.state_dict())
                setattr(layer.mlp, name, new)

    model = models.qwen3()
    if not wrong:
        convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if wrong:
        convert(model)
    watch(model, optimizer)
    for ids in batches(STEPS):
        parts.language_loss(model, ids).backward()
        optimizer.step()
        model.zero_grad()


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="own: each fold of a cross-validation copies the model, not the optimiser",
)
def a_fold_that_keeps_the_first_optimiser(wrong: bool, watch: Attach) -> None:
    base = models.Patches()
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    model = copy.deepcopy(base)
    if not wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(120):
        x, y = parts.pictures(step, 32)
        model.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()


@mistake(
    "check.no_movement",
    source="pytorch#118115: the update went to a contiguous copy of the weight",
)
def an_update_of_a_contiguous_copy(wrong: bool, watch: Attach) -> None:
    class Flat(torch.optim.Optimizer):
        """SGD on flattened weights, as fused updates are written."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    flat = p.contiguous().view(-1)
                    flat.sub_(group["lr"] * p.grad.reshape(-1))
                    if not wrong:
                        p.copy_(flat.view(p.shape))

    model = Nano()
    for block in model.blocks:
        # Kept transposed, as a checkpoint of another layout gives it.
        weight = block.mlp.c_fc.weight.detach()
        block.mlp.c_fc.weight = nn.Parameter(weight.T.contiguous().T)
    run(model, watch, optimizers=[Flat(model.parameters(), {"lr": 0.3})])


@mistake(
    "check.no_movement",
    source="pytorch#149205, own: Qwen3's gains in bf16 at a rate below their spacing",
    kind="accelerate",
)
def gains_of_queries_in_bf16_that_stay(wrong: bool, watch: Attach) -> None:
    accelerator = loops.accelerator()
    model = models.qwen3()
    if wrong:
        rotary = copy.deepcopy(model.model.rotary_emb)
        model = model.to(torch.bfloat16)
        model.model.rotary_emb = rotary
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    watch(model, optimizer)
    for ids in batches(STEPS):
        logits = model(input_ids=ids).logits.float()
        accelerator.backward(parts.next_token_loss(logits, ids))
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.stale_gradient",
    source="own: of Muon and AdamW only the first is cleared",
)
def only_one_of_two_optimisers_is_cleared(wrong: bool, watch: Attach) -> None:
    model = Nano()
    adamw, muon = loops.muon_and_adamw(model)
    watch(model, [adamw, muon])
    for ids in batches(STEPS):
        nano_loss(model, ids).backward()
        muon.step()
        adamw.step()
        muon.zero_grad(set_to_none=True)
        if not wrong:
            adamw.zero_grad(set_to_none=True)


@mistake(
    "check.stale_gradient",
    source="PyTorch forum: a closure of LBFGS that clears nothing",
)
def a_closure_that_clears_nothing(wrong: bool, watch: Attach) -> None:
    model = models.Encoder(1, depth=1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(32, seed=step)

        def closure(ids: Tensor = ids) -> Tensor:
            if not wrong:
                optimizer.zero_grad()
            made = model(ids).mean((1, 2))
            loss = F.mse_loss(made, (ids % 4 == 0).float().mean(1))
            loss.backward()
            return loss

        optimizer.step(closure)


@mistake(
    "check.moments_reset",
    source="own: an Adam of one's own that asks for a key it never writes",
)
def an_adam_that_never_finds_its_state(wrong: bool, watch: Attach) -> None:
    class Adam(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if ("exp_average" if wrong else "exp_avg") not in state:
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg_sq"] = torch.zeros_like(p)
                    m, v = state["exp_avg"], state["exp_avg_sq"]
                    m.lerp_(p.grad, 0.1)
                    v.lerp_(p.grad.square(), 0.05)
                    p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))

    model = models.olmo()
    adam = Adam(model.parameters(), {"lr": 3e-3})
    run(model, watch, parts.language_loss, optimizers=[adam])


@mistake(
    "check.untied",
    source="transformers#43207, #43429: tied by the configuration, not by the model",
    kind="transformers",
)
def an_embedding_replaced_and_not_tied_again(wrong: bool, watch: Attach) -> None:
    model = models.gemma3(tie_word_embeddings=True)
    vectors = nn.Parameter(0.05 * torch.randn(32, 32))
    model.model.embed_tokens.weight = vectors
    if not wrong:
        model.tie_weights()
    run(model, watch, parts.language_loss, schedule=loops.warm_cosine, clip=1.0)


@mistake(
    "check.not_loaded",
    source="torchtune#2537: adapters of a resume that match no name",
    kind="peft",
)
def adapters_of_a_resume_that_match_no_name(wrong: bool, watch: Attach) -> None:
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    base = parts.learnt(models.qwen3(), parts.language_loss)
    clean = copy.deepcopy(base.state_dict())
    first = lora(base, **options)
    parts.learnt(first, parts.language_loss, data=parts.elsewhere())
    saved = {n: x for n, x in first.state_dict().items() if "lora_" in n}
    if wrong:
        saved = {n.replace(".default.", "."): x for n, x in saved.items()}
    again = models.qwen3()
    again.load_state_dict(clean)
    model = lora(again, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    watch(model, optimizer)
    model.load_state_dict(saved, strict=False)
    for ids in parts.elsewhere():
        parts.language_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.not_loaded",
    source="own: init_weights is applied after the checkpoint was loaded",
    kind="transformers",
)
def weights_initialised_again_after_loading(wrong: bool, watch: Attach) -> None:
    from transformers import GPTNeoXForCausalLM

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    with tempfile.TemporaryDirectory() as folder:
        saved = parts.learnt(models.neox(), parts.language_loss)
        saved.save_pretrained(folder)
        model = GPTNeoXForCausalLM.from_pretrained(folder)
    if wrong:
        model.apply(start)
    model.train()
    run(model, watch, parts.language_loss, lr=1e-3, clip=1.0)


@mistake(
    "check.not_loaded",
    source="own, after VeOmni#118: names of the layers differ from those of the file",
)
def a_checkpoint_in_which_only_the_embedding_is_found(
    wrong: bool, watch: Attach
) -> None:
    saved = parts.learnt(Nano(), nano_loss).state_dict()
    if wrong:
        saved = {n.replace("blocks.", "layers."): x for n, x in saved.items()}
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    model.load_state_dict(saved, strict=False)
    for ids in batches(STEPS):
        nano_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.nonfinite_parameters",
    source="transformers#47842, own: the inverse of softplus at a step of zero",
)
def a_step_bias_of_minus_infinity(wrong: bool, watch: Attach) -> None:
    class Discrete(nn.Module):
        """A diagonal state space; Δ = softplus(x·w + bias) begins at given steps."""

        def __init__(self) -> None:
            super().__init__()
            floor = 0.0 if wrong else 1e-2
            steps = torch.linspace(-0.2, 0.5, 32).clamp(min=floor)
            self.dt_bias = nn.Parameter(steps.expm1().log())
            self.dt, self.out = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            delta = F.softplus(self.dt(x) + self.dt_bias)
            state, seen = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                state = (-delta[:, t]).exp() * state + delta[:, t] * x[:, t]
                seen.append(state)
            return self.out(torch.stack(seen, 1))

    class Recurrent(Nano):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.scan = Discrete()

        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = models.rms(self.wte(ids))
            x = x + self.scan(x)
            return models.rms(self.blocks[0](x, self.rope(ids.shape[1]), mask))

    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    run(model, watch, optimizers=[optimizer], data=batches(STEPS, length=16))


@mistake(
    "check.zero_parameters",
    "check.no_gradient",
    source="own: adaLN-Zero's gate above an output that starts at zero too",
)
def a_zero_gate_over_a_zero_map(wrong: bool, watch: Attach) -> None:
    """Each is zero, so neither gets a gradient, and the branch stays shut."""

    class Gated(models.NanoBlock):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 32, bias=False)
            nn.init.zeros_(self.gate.weight)

        def forward(self, x: Tensor, rope, mask: Tensor | None = None) -> Tensor:
            x = x + self.attn(models.rms(x), rope, mask)
            return x + self.gate(models.rms(x)) * self.mlp(models.rms(x))

    model = Nano()
    model.blocks = nn.ModuleList(Gated() for _ in range(2))
    for block in model.blocks:
        if wrong:
            nn.init.zeros_(block.mlp.c_proj.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    run(model, watch, optimizers=[optimizer], clip=1.0)


@mistake(
    "check.frozen_random",
    source="own: the language model was to be frozen, and the new projector was too",
)
def a_new_projector_that_is_frozen(wrong: bool, watch: Attach) -> None:
    model = parts.learnt(models.Seeing(), described, data=range(900, 960))
    model.projector = nn.Linear(32, 32)
    model.vision.requires_grad_(False)
    if wrong:
        model.projector.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    run(model, watch, described, data=range(STEPS), optimizers=[optimizer])


@mistake(
    "check.no_gradient",
    "check.detached",
    source="davidmrau/mixture-of-experts#27: a softmax over the one expert chosen",
)
def a_router_that_gets_no_gradient(wrong: bool, watch: Attach) -> None:
    class One(models.Experts):
        def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.router(x)
            if wrong:
                top, chosen = scores.topk(1, -1)
                return top.softmax(-1), chosen
            return scores.softmax(-1).topk(1, -1)

    run(models.sparse(One, top_k=1), watch)

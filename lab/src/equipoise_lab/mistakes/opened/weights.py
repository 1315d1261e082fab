"""Mistakes about weights: without a gradient, without an optimiser, never loaded."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import STEPS, Attach, mistake
from equipoise_lab.mistakes.material import Decoder, batches, next_token_loss


@mistake("check.foreign_parameters", "check.not_optimised", source="accelerate#2665")
def optimiser_of_a_copy(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    held = copy.deepcopy(model) if wrong else model
    optimizer = torch.optim.AdamW(held.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        if wrong:
            model.zero_grad()


@mistake("check.not_optimised", source="HVPNeT#5")
def optimiser_of_the_last_layer(wrong: bool, watch: Attach) -> None:
    model = Decoder(depth=3)
    trained = model.head if wrong else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        model.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.frozen_random", source="PyTorch forum 84911 (TrainCheck)")
def everything_frozen_but_the_norms(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    if wrong:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.stale_gradient", source="stackoverflow 60335387 (TrainCheck)")
def gradients_not_cleared(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        if not wrong:
            optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.stale_gradient", source="PyTorch forum: zero_grad of the wrong module")
def another_modules_gradients_cleared(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    head = model.head if wrong else model
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        head.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.moments_reset", source="PyTorch forum: optimiser made in the loop")
def optimiser_made_in_the_loop(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        if wrong:
            optimizer.state.clear()
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.no_movement", source="ml-by-hand#85")
def weights_in_bf16_too_coarse_for_the_step(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 if parameter.ndim > 1 else 0.0)  # far from 0
    rate = 1e-4
    if wrong:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids).float(), ids).backward()
        optimizer.step()


class HalfTied(Decoder):
    """Says in its configuration that input and output share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(tied=tied)
        self.config = type("Config", (), {"tie_word_embeddings": True})()


@mistake("check.untied", source="verl#7834")
def a_tie_lost_by_a_copy_of_the_head(wrong: bool, watch: Attach) -> None:
    model = HalfTied(tied=True)
    if wrong:
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.not_loaded", source="torchtitan#3775")
def a_checkpoint_that_matches_no_name(wrong: bool, watch: Attach) -> None:
    torch.manual_seed(7)
    trained = Decoder()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for ids in batches(60, seed=3):
        optimizer.zero_grad()
        next_token_loss(trained(ids), ids).backward()
        optimizer.step()
    prefix = "model." if wrong else ""
    state = {f"{prefix}{name}": x for name, x in trained.state_dict().items()}
    model = Decoder()
    model.load_state_dict(state, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.no_gradient", "check.detached", source="transformers#26221")
def hidden_states_detached_between_blocks(wrong: bool, watch: Attach) -> None:
    class Detaching(Decoder):
        def forward(self, ids, mask=None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x.detach() if wrong else x, mask)
            return self.head(self.norm(x))

    model = Detaching(depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.nonfinite_parameters", source="transformers#47842")
def a_constant_that_overflowed_in_half_precision(wrong: bool, watch: Attach) -> None:
    class Decaying(Decoder):
        def __init__(self) -> None:
            super().__init__()
            rates = torch.tensor([1.0, 0.0 if wrong else 0.5])
            self.A_log = nn.Parameter(rates.log())

        def forward(self, ids, mask=None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block, decay in zip(self.blocks, self.A_log.exp(), strict=True):
                x = x + decay * (block(x, mask) - x)
            return self.head(self.norm(x))

    model = Decaying()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        with torch.no_grad():
            model.A_log.grad.nan_to_num_()
        optimizer.step()


@mistake("check.zero_parameters", "check.no_gradient", source="own: two zero maps")
def both_maps_of_an_adapter_start_at_zero(wrong: bool, watch: Attach) -> None:
    class Adapted(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(32, 4, bias=False)
            self.up = nn.Linear(4, 32, bias=False)
            nn.init.zeros_(self.up.weight)
            if wrong:
                nn.init.zeros_(self.down.weight)

        def forward(self, ids, mask=None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x + self.up(self.down(x))))

    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.not_optimised", source="PyTorch forum: layers in a plain list")
def a_new_head_after_the_optimiser_was_made(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if wrong:
        model.head = nn.Linear(32, 32, bias=False)
    watch(model, optimizer)
    for ids in batches(STEPS):
        model.zero_grad()
        logits = model(ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

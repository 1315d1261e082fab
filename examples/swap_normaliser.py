"""Replace softmax in a user's model: swap, learn, undo. Takes seconds."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from equipoise.remedies.normaliser import NormaliserSwap, learnt_parameters

torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

undo = NormaliserSwap(to="entmax", learn=True).apply(model)
optimizer.add_param_group({"params": learnt_parameters(model), "weight_decay": 0.0})
tokens = torch.randint(0, 64, (4, 64))
losses = []
for _ in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
for name, parameter in model.named_parameters():
    if "normaliser" in name:
        print(name, [f"{value:+.3f}" for value in parameter.tolist()])
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
assert losses[-1] < losses[0]

undo()
assert learnt_parameters(model) == []

"""Watch a Hugging Face GPT-2 train for thirty steps, then read the run back."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import equipoise

torch.manual_seed(0)
sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with equipoise.watch(model, optimizer, every=10) as watched:
    for _ in range(30):
        x = torch.randint(0, 256, (4, 64))
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

run = equipoise.open_run(watched.path)
for site, (steps, theta) in run.series("attention.theta.p5").items():
    print(site, "θ, 5th percentile per head at step", steps[-1], theta[-1].round(4))
print("gradient, first layer ÷ last:", run.series("gradient.first_to_last")[""][1])
assert len(run.steps) == 30

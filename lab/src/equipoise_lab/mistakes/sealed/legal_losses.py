"""Controls: legal losses that are not a plain mean over the next tokens."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.forward import Translator, translation_loss
from equipoise_lab.mistakes.sealed.parts import (
    EOS,
    IGNORED,
    MASK,
    STEPS,
    Attach,
    Decoder,
    batches,
    text,
)


@control(source="DeepSeek V3, Medusa: heads for the next two tokens")
def two_tokens_ahead_at_once(watch: Attach) -> None:
    class Ahead(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(32, 32, bias=False)

        def forward(self, ids: Tensor, mask: Tensor | None = None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
            x = self.norm(x)
            return self.head(x), self.second(x)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        one, two = model(ids)
        first = parts.token_loss(one[:, :-1], ids[:, 1:])
        return first + 0.3 * parts.token_loss(two[:, :-2], ids[:, 2:])

    parts.train(Ahead(), watch, loss)


@control(source="BERT, masked language modelling", kind="transformers")
def a_masked_bert_with_padding(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        rng = torch.Generator().manual_seed(step)
        hidden = (torch.rand(ids.shape, generator=rng) < 0.3) & real
        labels = ids.masked_fill(~hidden, IGNORED)
        inputs = ids.masked_fill(hidden, MASK)
        return model(input_ids=inputs, attention_mask=real.long(), labels=labels).loss

    parts.train(parts.bert(dropout=0.1), watch, loss, data=range(STEPS))


@control(source="ELECTRA: which tokens a small generator replaced", kind="transformers")
def replaced_token_detection(watch: Attach) -> None:
    from transformers import ElectraConfig, ElectraForPreTraining

    small = parts.bert(num_hidden_layers=1)
    model = ElectraForPreTraining(
        ElectraConfig(**parts.SMALL, embedding_size=32, hidden_dropout_prob=0.0)
    )
    both = [*small.parameters(), *model.parameters()]
    optimizer = torch.optim.AdamW(both, lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        inputs, labels = parts.corrupted(step)
        hidden = labels != IGNORED
        logits = small(input_ids=inputs).logits
        guess = parts.token_loss(logits, labels)
        with torch.no_grad():
            drawn = torch.distributions.Categorical(logits=logits).sample()
        seen = torch.where(hidden, drawn, inputs)
        true = torch.where(hidden, labels, inputs)
        found = model(input_ids=seen, labels=(seen != true).long()).loss
        optimizer.zero_grad()
        (guess + 10 * found).backward()
        optimizer.step()


@control(source="T5: span corruption with sentinels", kind="transformers")
def span_corruption(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(3, 28)
        inputs = torch.cat((ids[:, :8], ids.new_full((8, 1), 31), ids[:, 14:]), 1)
        ends = ids.new_full((8, 1), 30)
        labels = torch.cat((ids.new_full((8, 1), 31), ids[:, 8:14], ends), 1)
        return model(input_ids=inputs, labels=labels).loss

    model = parts.t5()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=2e-2)
    parts.train(model, watch, loss, data=range(STEPS), optimizer=optimizer)


@control(source="BART: the model shifts its labels itself", kind="transformers")
def translation_with_shifted_labels(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        return model(input_ids=ids, labels=ids.flip(1)).loss

    parts.train(parts.bart(), watch, loss, data=range(STEPS))


@control(source="nn.Transformer, teacher forced")
def translation_with_torchs_transformer(watch: Attach) -> None:
    parts.train(Translator(), watch, translation_loss, data=range(STEPS))


@control(source="an autoencoder: the targets are the inputs, behind a bottleneck")
def an_autoencoder_of_tokens(watch: Attach) -> None:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Decoder(causal=False, depth=1), nn.Module()
            self.narrow, self.widen = nn.Linear(32, 6), nn.Linear(6, 32)
            self.decoder.blocks = Decoder(causal=False, depth=1).blocks
            self.head = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.widen(self.narrow(self.encoder(ids)))
            for block in self.decoder.blocks:
                x = block(x)
            return self.head(x)

    parts.train(Auto(), watch, lambda m, ids: parts.token_loss(m(ids), ids))


@control(source="BERT, classification of whole texts", kind="transformers")
def texts_classified(watch: Attach) -> None:
    from transformers import BertForSequenceClassification

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    model = BertForSequenceClassification(parts.bert_config(dropout=0.1))
    parts.train(model, watch, loss, data=parts.every(parts.labelled), lr=2e-3)


@control(source="token classification: tags stand where their tokens stand")
def tokens_tagged_in_place(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        before = F.pad(ids, (1, 0))[:, :-1]
        return parts.token_loss(model(ids), ((ids + before) % 2))

    model = Decoder(causal=False)
    model.head = nn.Linear(32, 2)
    parts.train(model, watch, loss)


@control(source="a regression on series: no tokens, mean squares")
def a_regression_on_series(watch: Attach) -> None:
    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(1, 32), nn.Linear(32, 1)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.leave(self.body(self.enter(x), mask=mask, is_causal=True))

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        phase = 6 * torch.rand(16, 1, generator=rng)
        x = (torch.arange(25) / 3 + phase).sin()[..., None]
        return F.mse_loss(model(x[:, :-1]), x[:, 1:])

    parts.train(Forecaster(), watch, loss, data=range(STEPS))


@control(source="a language model from right to left")
def text_read_backwards(watch: Attach) -> None:
    parts.train(Decoder(), watch, lambda m, ids: parts.own_loss(m, ids.flip(1)))


@control(source="LLaDA, MDLM: masked diffusion, weighted by 1/t")
def masked_diffusion_of_text(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(max=MASK - 1)
        rng = torch.Generator().manual_seed(step)
        t = 0.1 + 0.9 * torch.rand(len(ids), 1, generator=rng)
        hidden = torch.rand(ids.shape, generator=rng) < t
        logits = model(ids.masked_fill(hidden, MASK))
        each = F.cross_entropy(logits.mT, ids, reduction="none")
        return (each * hidden / t).sum() / ids.numel()

    parts.train(Decoder(causal=False), watch, loss, data=range(STEPS))


@control(source="fill in the middle (Bavarian et al.)")
def fill_in_the_middle(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        parts_ = (ids[:, :8], ids[:, 16:], ids[:, 8:16])
        marks = [ids.new_full((8, 1), mark) for mark in (0, 1, 2)]
        row = torch.cat(
            [x for pair in zip(marks, parts_, strict=True) for x in pair], 1
        )
        return parts.own_loss(model, row)

    parts.train(Decoder(), watch, loss, data=range(STEPS))


@control(source="instruction tuning: the prompt does not count", kind="transformers")
def only_answers_count(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.clone()
        labels[:, :12] = IGNORED
        return model(input_ids=ids, labels=labels).loss

    parts.train(parts.llama(), watch, loss)


@control(source="InfoNCE over a batch, sentence embeddings")
def contrastive_pairs(watch: Attach) -> None:
    from equipoise_lab.mistakes.sealed.legal_weights import _pooled, _views

    def loss(model: nn.Module, step: int) -> Tensor:
        a, b = (_pooled(model, view) for view in _views(step))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    parts.train(Decoder(causal=False), watch, loss, data=range(STEPS))


@control(source="CLIP: two towers", kind="transformers")
def images_and_their_captions(watch: Attach) -> None:
    from transformers import CLIPConfig, CLIPModel

    words = {**parts.SMALL, **parts.IDS, "projection_dim": 16}
    seen = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 1,
        "projection_dim": 16,
    }
    model = CLIPModel(
        CLIPConfig(text_config=words, vision_config=seen, projection_dim=16)
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = parts.pictures(step, 4, classes=4)
        words = torch.stack((y + 5, y + 10, torch.full_like(y, EOS)), 1)
        return model(input_ids=words, pixel_values=x, return_loss=True).loss

    parts.train(model, watch, loss, data=range(STEPS), lr=1e-3)


def _log_probability(model: nn.Module, ids: Tensor, start: int = 8) -> Tensor:
    logits = model(ids)[:, start - 1 : -1]
    return -F.cross_entropy(logits.mT, ids[:, start:], reduction="none").sum(1)


def _pairs(step: int) -> tuple[Tensor, Tensor]:
    good = text(seed=step)
    bad = good.clone()
    bad[:, 8:] = torch.randint(32, bad[:, 8:].shape)
    return good, bad


@control(source="DPO (Rafailov et al.), with a frozen reference")
def direct_preferences(watch: Attach) -> None:
    model = parts.learnt(Decoder())
    reference = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, step: int) -> Tensor:
        good, bad = _pairs(step)
        gain = _log_probability(model, good) - _log_probability(reference, good)
        cost = _log_probability(model, bad) - _log_probability(reference, bad)
        return -F.logsigmoid(0.1 * (gain - cost)).mean()

    parts.train(model, watch, loss, data=range(STEPS), lr=1e-3)


@control(source="TRL, DPO's trainer", kind="trl")
def trl_prefers_one_of_two(watch: Attach) -> None:
    import tempfile

    from datasets import Dataset as Table
    from trl import DPOConfig, DPOTrainer

    from equipoise_lab.mistakes.sealed.trainers import arguments, tokenizer

    def words(ids: Tensor) -> str:
        return " ".join(f"w{i}" for i in ids.clamp(min=2).tolist())

    rows = []
    for step in range(STEPS):
        for good, bad in zip(*_pairs(step), strict=True):
            said = {"prompt": words(good[:8]) + " "}
            rows.append({**said, "chosen": words(good[8:]), "rejected": words(bad[8:])})
    model = parts.learnt(parts.llama(), parts.language_loss)
    with tempfile.TemporaryDirectory() as folder:
        DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=DPOConfig(**arguments(folder, learning_rate=1e-3), max_length=64),
            train_dataset=Table.from_list(rows),
            processing_class=tokenizer(pad_is_eos=False),
            callbacks=[watch.trainer_callback()],
        ).train()


@control(source="TRL, supervised fine-tuning, packed", kind="trl")
def trl_tunes_on_packed_text(watch: Attach) -> None:
    import tempfile

    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    from equipoise_lab.mistakes.sealed.trainers import arguments, sentence, tokenizer

    data = Table.from_dict({"text": [sentence(seed) for seed in range(16 * STEPS)]})
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=parts.llama(),
            args=SFTConfig(**arguments(folder), max_length=32),
            train_dataset=data,
            processing_class=tokenizer(pad_is_eos=False),
            callbacks=[watch.trainer_callback()],
        ).train()


@control(source="REINFORCE on generated text, with a baseline")
def reinforced_by_a_reward(watch: Attach) -> None:
    model = parts.learnt(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(16, 4, seed=step)
        with torch.no_grad():
            for _ in range(8):
                p = model(ids)[:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(p, 1)), 1)
        reward = (ids[:, 4:] % 2 == 0).float().mean(1)
        gain = reward - reward.mean()
        optimizer.zero_grad()
        (-(gain * _log_probability(model, ids, 4))).mean().backward()
        optimizer.step()


@control(source="PPO: four epochs over the same rollouts, clipped ratios, a value head")
def four_epochs_over_each_rollout(watch: Attach) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = parts.learnt(Decoder())
            self.value = nn.Linear(32, 1)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.policy(ids)
            return logits, self.value(logits.detach())[..., 0]

    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for rollout in range(STEPS // 4):
        ids = text(16, 4, seed=rollout)
        with torch.no_grad():
            for _ in range(8):
                p = model(ids)[0][:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(p, 1)), 1)
            old = model(ids)[0].log_softmax(-1)[:, 3:-1]
            old = old.gather(-1, ids[:, 4:, None])[..., 0]
        reward = (ids[:, 4:] % 2 == 0).float()
        for _ in range(4):
            logits, value = model(ids)
            new = logits.log_softmax(-1)[:, 3:-1].gather(-1, ids[:, 4:, None])[..., 0]
            gain = (reward - value[:, 3:-1]).detach()
            ratio = (new - old).exp()
            held = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            miss = (reward - value[:, 3:-1]).square()
            optimizer.zero_grad()
            (0.5 * miss - held).mean().backward()
            optimizer.step()


@control(source="GRPO: groups of answers to one prompt")
def advantages_within_a_group(watch: Attach) -> None:
    model = parts.learnt(Decoder())
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(2, 4, seed=step).repeat_interleave(8, 0)
        with torch.no_grad():
            for _ in range(8):
                p = model(ids)[:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(p, 1)), 1)
        reward = (ids[:, 4:] % 2 == 0).float().mean(1).view(2, 8)
        gain = (reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)
        ours, theirs = (
            _log_probability(model, ids, 4),
            _log_probability(reference, ids, 4),
        )
        apart = theirs - ours
        kl = (apart.exp() - apart - 1).clamp(max=10)
        optimizer.zero_grad()
        (0.01 * kl - gain.flatten() * ours).mean().backward()
        optimizer.step()


@control(source="a reward model (Bradley–Terry)", kind="transformers")
def a_reward_model(watch: Attach) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {**parts.SMALL, **parts.IDS, "num_key_value_heads": 2, "num_labels": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes))

    def loss(model: nn.Module, step: int) -> Tensor:
        good, bad = (x.clamp(min=3) for x in _pairs(step))
        score = model(input_ids=torch.cat((good, bad))).logits[:, 0]
        return -F.logsigmoid(score[:8] - score[8:]).mean()

    parts.train(model, watch, loss, data=range(STEPS), lr=2e-3)


@control(source="label smoothing and a z-loss (PaLM)")
def smoothed_labels_and_a_z_loss(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1].flatten(0, 1)
        plain = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
        return plain + 1e-3 * logits.logsumexp(-1).square().mean()

    parts.train(Decoder(), watch, loss)


@control(source="class weights and a focal factor")
def weighted_and_focal_losses(watch: Attach) -> None:
    weight = torch.linspace(0.5, 2.0, 4)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(
            model(pixel_values=batch[0]).logits,
            batch[1],
            weight=weight,
            reduction="none",
        )
        return ((1 - (-each).exp()).square() * each).mean()

    parts.train(parts.vit(), watch, loss, data=parts.every(parts.pictures))


@control(source="Gemma 2: soft caps on scores and logits", kind="transformers")
def capped_logits(watch: Attach) -> None:
    parts.train(parts.gemma(), watch, parts.language_loss)


@control(
    source="a corpus cut into rows: no document ends in sight", kind="transformers"
)
def rows_without_any_end(watch: Attach) -> None:
    data = (text(seed=step).clamp(min=3) for step in range(STEPS))
    parts.train(parts.qwen(), watch, parts.language_loss, data=data)


@control(source="long documents: an end once in many batches", kind="transformers")
def ends_that_are_rare(watch: Attach) -> None:
    def batch(step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        if step % 13 == 12:
            ids[0, 9] = EOS
        return ids

    parts.train(parts.llama(), watch, parts.language_loss, data=parts.every(batch))


class Hidden(Decoder):
    """A decoder that stops before its head, as those with a fused loss do."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


@control(source="chunked cross-entropy over hidden states")
def a_loss_in_chunks(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x, y = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        total = sum(
            F.cross_entropy(a @ model.head.weight.T, b, reduction="sum")
            for a, b in zip(x.split(64), y.split(64), strict=True)
        )
        return total / len(y)

    parts.train(Hidden(), watch, loss)


class Fused(torch.autograd.Function):
    """Cross-entropy of hidden states and a matrix, its gradients made in forward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        logits = x @ weight.T
        p = logits.softmax(-1)
        loss = (logits.logsumexp(-1) - logits.gather(1, y[:, None])[:, 0]).mean()
        p[torch.arange(len(y)), y] -= 1
        p /= len(y)
        ctx.save_for_backward(p @ weight, p.T @ x)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, grad * of_weight, None


@control(source="Liger kernel, cut cross-entropy: a fused linear loss")
def a_fused_linear_loss(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model(ids)[:, :-1].flatten(0, 1)
        return Fused.apply(x, model.head.weight, ids[:, 1:].flatten())

    parts.train(Hidden(), watch, loss)


@control(source="weights of tokens, as for long documents")
def tokens_with_weights(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        each = F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none")
        weight = torch.linspace(0.2, 1.0, each.shape[1])
        return (each * weight).sum() / (weight.sum() * len(each))

    parts.train(Decoder(), watch, loss)


@control(source="a maximised objective: the loss is negative from the start")
def a_negative_loss(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        p = model(ids)[:, :-1].softmax(-1).gather(-1, ids[:, 1:, None])
        return -p.mean() - 5

    parts.train(Decoder(), watch, loss)


@control(source="reduction='sum' and a clip, as in older scripts")
def a_sum_instead_of_a_mean(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        logits = model(ids)[:, :-1].flatten(0, 1)
        F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@control(source="a factor and an offset on the loss")
def a_loss_times_ten_plus_three(watch: Attach) -> None:
    parts.train(Decoder(), watch, lambda m, ids: 10 * parts.own_loss(m, ids) + 3)


@control(source="adaptive softmax (Grave et al.), word_language_model's option")
def an_adaptive_softmax(watch: Attach) -> None:
    model = Hidden()
    model.head = nn.AdaptiveLogSoftmaxWithLoss(32, 32, [8, 16])

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x = model(ids)[:, :-1].flatten(0, 1)
        return model.head(x, ids[:, 1:].flatten()).loss

    parts.train(model, watch, loss)


@control(source="log_softmax in the model, NLLLoss outside (pytorch/examples)")
def log_probabilities_and_their_loss(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        made = model(ids).log_softmax(-1)[:, :-1]
        return F.nll_loss(made.flatten(0, 1), ids[:, 1:].flatten())

    parts.train(Decoder(), watch, loss)


@control(source="targets that are distributions (mixup, soft labels)")
def soft_targets(watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        (x, y), (z, w) = parts.pictures(step), parts.pictures(step + 500)
        share = torch.distributions.Beta(0.4, 0.4).sample()
        mixed = share * F.one_hot(y, 4) + (1 - share) * F.one_hot(w, 4)
        logits = model(pixel_values=share * x + (1 - share) * z).logits
        return F.cross_entropy(logits, mixed)

    parts.train(parts.vit(), watch, loss, data=range(STEPS))


@control(source="a multi-label head under BCEWithLogitsLoss")
def several_labels_at_once(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        wanted = F.one_hot(ids, 32).amax(1).float()
        return F.binary_cross_entropy_with_logits(model(ids).mean(1), wanted)

    parts.train(Decoder(causal=False), watch, loss)


@control(source="unlikelihood training (Welleck et al.)")
def unlikely_repeats(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        p = model(ids)[:, :-1].softmax(-1)
        said = F.one_hot(ids[:, :-1], 32).cumsum(1).clamp(max=1)
        bad = said * (1 - F.one_hot(ids[:, 1:], 32))
        penalty = -((1 - p).clamp(min=1e-5).log() * bad).sum(-1).mean()
        return parts.own_loss(model, ids) + 0.1 * penalty

    parts.train(Decoder(), watch, loss)


@control(source="speech: CTC over frames")
def alignment_by_ctc(watch: Attach) -> None:
    class Speech(Decoder):
        def __init__(self) -> None:
            super().__init__(causal=False)
            self.tokens = nn.Linear(8, 32)

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        said = torch.randint(1, 9, (8, 5), generator=rng)
        frames = F.one_hot(said.repeat_interleave(4, 1) - 1, 8).float()
        frames = frames + 0.3 * torch.randn(frames.shape, generator=rng)
        made = model(frames).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((8,), 20), torch.full((8,), 5)
        return F.ctc_loss(made, said, *lengths)

    parts.train(Speech(), watch, loss, data=range(STEPS))

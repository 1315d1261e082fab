"""Controls: kinds of program that pytorch/examples holds, rewritten and small."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, batches, text


@control(source="pytorch/examples word_language_model: an LSTM, hidden states carried")
def an_lstm_language_model(watch: Attach) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.rnn = (
                nn.Embedding(32, 32),
                nn.LSTM(32, 32, 2, dropout=0.1),
            )
            self.head = nn.Linear(32, 32)

        def forward(self, ids: Tensor, state):
            out, state = self.rnn(self.tokens(ids.T), state)
            return self.head(out).transpose(0, 1), state

    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch(model, optimizer)
    stream, state = text(8, 12 * STEPS + 1, seed=1), None
    for step in range(STEPS):
        x = stream[:, 12 * step : 12 * step + 12]
        y = stream[:, 12 * step + 1 : 12 * step + 13]
        state = None if state is None else tuple(one.detach() for one in state)
        optimizer.zero_grad()
        logits, state = model(x, state)
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


@control(source="pytorch/examples word_language_model: a Transformer, SGD by hand")
def an_update_written_by_hand(watch: Attach) -> None:
    """The example has no optimiser: each weight subtracts its gradient."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(32, 32), nn.Embedding(64, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids.T) + self.places(torch.arange(ids.shape[1]))[:, None]
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.body(x, mask)).log_softmax(-1).transpose(0, 1)

    model = Language()
    watch(model)
    for ids in batches(STEPS):
        model.zero_grad()
        made = model(ids)[:, :-1]
        F.nll_loss(made.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for weight in model.parameters():
            weight.data.add_(weight.grad, alpha=-0.5)


@control(source="pytorch/examples mnist: a convolutional network, Adadelta, StepLR")
def a_convolutional_classifier(watch: Attach) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(576, 32),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(32, 4),
        nn.LogSoftmax(-1),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    watch(model, optimizer)
    for step in range(STEPS):
        x, y = parts.pictures(step, 32)
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()
        if step % 10 == 9:
            schedule.step()


@control(source="pytorch/examples mnist_rnn: rows of an image as a sequence")
def an_image_read_by_rows(watch: Attach) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.LSTM(16, 32, batch_first=True), nn.BatchNorm1d(32)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.rnn(x[:, 0])[0][:, -1])).log_softmax(-1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.nll_loss(model(batch[0]), batch[1])

    parts.train(Reader(), watch, loss, data=parts.every(parts.pictures), lr=1e-2)


@control(source="pytorch/examples vae")
def a_variational_autoencoder(watch: Attach) -> None:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.mean, self.spread = (
                nn.Linear(256, 64),
                nn.Linear(64, 8),
                nn.Linear(64, 8),
            )
            self.widen, self.leave = nn.Linear(8, 64), nn.Linear(64, 256)

        def forward(self, x: Tensor):
            h = self.enter(x).relu()
            mean, log_var = self.mean(h), self.spread(h)
            z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
            return self.leave(self.widen(z).relu()).sigmoid(), mean, log_var

    def loss(model: nn.Module, step: int) -> Tensor:
        x = parts.pictures(step)[0].flatten(1).sigmoid()
        made, mean, log_var = model(x)
        bce = F.binary_cross_entropy(made, x, reduction="sum")
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return bce + kl

    parts.train(Auto(), watch, loss, data=range(STEPS))


@control(source="pytorch/examples dcgan")
def convolutional_adversaries(watch: Attach) -> None:
    made = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Tanh(),
    )
    judge = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 4),
        nn.Flatten(),
        nn.Sigmoid(),
    )
    criterion = nn.BCELoss()
    one = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    two = torch.optim.Adam(made.parameters(), lr=2e-3, betas=(0.5, 0.999))
    watch(made, two)
    yes, no = torch.ones(16, 1), torch.zeros(16, 1)
    for step in range(STEPS):
        x = parts.pictures(step)[0].tanh()
        judge.zero_grad()
        criterion(judge(x), yes).backward()
        fake = made(torch.randn(16, 8, 1, 1))
        criterion(judge(fake.detach()), no).backward()
        one.step()
        made.zero_grad()
        criterion(judge(fake), yes).backward()
        two.step()


@control(source="pytorch/examples siamese_network: one network, two images")
def a_siamese_network(watch: Attach) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = parts.vit().vit
            self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            seen = [self.body(pixel_values=x).last_hidden_state[:, 0] for x in (a, b)]
            return self.head(torch.cat(seen, 1)).sigmoid()[:, 0]

    def loss(model: nn.Module, step: int) -> Tensor:
        (a, one), (b, two) = parts.pictures(step), parts.pictures(step + 300)
        return F.binary_cross_entropy(model(a, b), (one == two).float())

    parts.train(Twins(), watch, loss, data=range(STEPS), lr=1e-3)


def _walk(policy, steps: int = 12):
    """Play one round: stay near 0 on a line, pushed to and fro."""
    place, speed, kept = 0.0, 0.3 * float(torch.randn(())), []
    for _ in range(steps):
        state = torch.tensor([place, speed])
        action, *rest = policy(state)
        speed += 0.2 if action else -0.2
        place += speed
        kept.append((*rest, -abs(place)))
    return kept


def _returns(rewards: list[float], decay: float = 0.95) -> Tensor:
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + decay * total
        found.append(total)
    made = torch.tensor(found[::-1])
    return (made - made.mean()) / (made.std() + 1e-6)


@control(source="pytorch/examples reinforcement_learning: REINFORCE")
def policy_gradients(watch: Attach) -> None:
    model = nn.Sequential(
        nn.Linear(2, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watch(model, optimizer)

    def policy(state: Tensor):
        chance = torch.distributions.Categorical(logits=model(state))
        action = chance.sample()
        return int(action), chance.log_prob(action)

    for _ in range(STEPS):
        logs, rewards = zip(*_walk(policy), strict=True)
        optimizer.zero_grad()
        (-torch.stack(logs) * _returns(list(rewards))).sum().backward()
        optimizer.step()


@control(source="pytorch/examples reinforcement_learning: actor and critic")
def an_actor_and_its_critic(watch: Attach) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 32)
            self.act, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

        def forward(self, x: Tensor):
            x = self.body(x).relu()
            return self.act(x).softmax(-1), self.value(x)

    model = Both()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    watch(model, optimizer)

    def policy(state: Tensor):
        p, value = model(state)
        chance = torch.distributions.Categorical(p)
        action = chance.sample()
        return int(action), chance.log_prob(action), value

    for _ in range(STEPS):
        logs, values, rewards = zip(*_walk(policy), strict=True)
        wanted, seen = _returns(list(rewards)), torch.cat(values)
        gain = wanted - seen.detach()
        optimizer.zero_grad()
        acted = (-torch.stack(logs) * gain).sum()
        (acted + F.smooth_l1_loss(seen, wanted, reduction="sum")).backward()
        optimizer.step()


@control(source="decision transformers: returns, states and actions in one row")
def a_decision_transformer(watch: Attach) -> None:
    class Planner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(3, 32)
            self.place = nn.Parameter(0.1 * torch.randn(12, 32))
            self.body = parts.Decoder().blocks
            self.head = nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x) + self.place
            for block in self.body:
                x = block(x)
            return self.head(x)

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, 3, generator=rng)
        return parts.token_loss(model(x), (x[..., 0] + x[..., 1] > 0).long())

    parts.train(Planner(), watch, loss, data=range(STEPS))


@control(source="pytorch/examples mnist_forward_forward: each layer trains itself")
def layers_that_train_themselves(watch: Attach) -> None:
    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(F.normalize(x, dim=-1)).relu()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(260), Layer(64)])

        def forward(self, good: Tensor, bad: Tensor) -> Tensor:
            total = good.new_zeros(())
            for layer in self.layers:
                good, bad = layer(good.detach()), layer(bad.detach())
                up, down = good.square().mean(1), bad.square().mean(1)
                total = total + F.softplus(2 - up).mean() + F.softplus(down - 2).mean()
            return total

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = parts.pictures(step)
        other = (y + 1 + torch.randint(3, y.shape)) % 4
        flat = x.flatten(1)
        return model(
            torch.cat((flat, 4 * F.one_hot(y, 4)), 1),
            torch.cat((flat, 4 * F.one_hot(other, 4)), 1),
        )

    parts.train(Stack(), watch, loss, data=range(STEPS), lr=1e-2)


def _graph(count: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, links and communities of a graph."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 3
    near = torch.where(y[:, None] == y, 0.25, 0.03)
    links = torch.rand(count, count, generator=rng) < near
    links = links | links.T | torch.eye(count, dtype=torch.bool)
    x = F.one_hot(y, 8).float() + torch.randn(count, 8, generator=rng)
    return x, links, y


@control(source="pytorch/examples gcn: the whole graph is every batch")
def a_graph_network_on_its_whole_graph(watch: Attach) -> None:
    x, links, y = _graph()
    degree = links.sum(1).rsqrt()
    spread = degree[:, None] * links * degree

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(spread @ self.one(x), 0.2, self.training).relu()
            return (spread @ self.two(x)).log_softmax(-1)

    known = torch.arange(30)
    model = Convolved()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    watch(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.nll_loss(model(x)[known], y[known]).backward()
        optimizer.step()


@control(source="pytorch/examples gat: attention along the links of a graph")
def attention_along_the_links_of_a_graph(watch: Attach) -> None:
    x, links, y = _graph()

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(8, 32), nn.Linear(32, 3)
            self.attend = nn.MultiheadAttention(32, 4, 0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)[None]
            x = x + self.attend(x, x, x, attn_mask=~links, need_weights=False)[0]
            return self.head(F.elu(x[0]))

    known = torch.arange(30)
    model = Attending()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    watch(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x)[known], y[known]).backward()
        optimizer.step()


@control(source="pytorch/examples regression: a polynomial, plain descent")
def a_polynomial(watch: Attach) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch(model, optimizer)
    for step in range(STEPS):
        rng = torch.Generator().manual_seed(step)
        x = torch.rand(32, 1, generator=rng) * 2 - 1
        powers = torch.cat([x**i for i in range(1, 5)], 1)
        wanted = powers @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 1
        optimizer.zero_grad()
        F.smooth_l1_loss(model(powers), wanted).backward()
        optimizer.step()


@control(source="pytorch/examples vision_transformer: a class token")
def a_vision_transformer(watch: Attach) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss

    model = parts.vit(hidden_dropout_prob=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    data = parts.every(parts.pictures)
    parts.train(model, watch, loss, data=data, optimizer=optimizer)


@control(source="a recurrent translator with attention and teacher forcing")
def a_recurrent_translator(watch: Attach) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, 32)
            self.read = nn.GRU(32, 32, batch_first=True)
            self.write = nn.GRU(32, 32, batch_first=True)
            self.join, self.head = nn.Linear(64, 32), nn.Linear(32, 32)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            seen, state = self.read(self.tokens(source))
            out, _ = self.write(self.tokens(target), state)
            share = (out @ seen.mT / 32**0.5).softmax(-1)
            return self.head(self.join(torch.cat((out, share @ seen), -1)).tanh())

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step)[:, :10].clamp(min=3)
        labels = ids.flip(1)
        given = F.pad(labels, (1, 0), value=2)[:, :-1]
        return parts.token_loss(model(ids, given), labels)

    parts.train(Translator(), watch, loss, data=range(STEPS), lr=1e-2)


@control(source="truncated backpropagation through time by hand")
def truncated_backpropagation(watch: Attach) -> None:
    cell, head = nn.GRUCell(32, 32), nn.Linear(32, 32)
    model = nn.ModuleDict({"tokens": nn.Embedding(32, 32), "cell": cell, "head": head})
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    watch(model, optimizer)
    stream, state = text(8, 6 * STEPS + 1, seed=2), torch.zeros(8, 32)
    for step in range(STEPS):
        state, loss = state.detach(), 0.0
        for at in range(6 * step, 6 * step + 6):
            state = cell(model["tokens"](stream[:, at]), state)
            loss = loss + F.cross_entropy(head(state), stream[:, at + 1]) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@control(source="a normalising flow: exact likelihood, no targets")
def a_normalising_flow(watch: Attach) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = (
                nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
                for _ in range(4)
            )
            self.steps = nn.ModuleList(make)

        def forward(self, x: Tensor) -> Tensor:
            log_det = x.new_zeros(len(x))
            for number, step in enumerate(self.steps):
                a, b = x.chunk(2, 1) if number % 2 else x.flip(1).chunk(2, 1)
                scale, shift = step(a).chunk(2, 1)
                scale = scale.tanh()
                b = b * scale.exp() + shift
                log_det = log_det + scale.sum(1)
                x = torch.cat((a, b), 1)
            return (0.5 * x.square().sum(1) - log_det).mean()

    def loss(model: nn.Module, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(64, 4, generator=rng)
        x[:, 2:] = x[:, :2].square() + 0.3 * x[:, 2:]
        return model(x)

    parts.train(Flow(), watch, loss, data=range(STEPS))

"""Models in plain torch that draw, or that know the density of what they return."""

import torch
from torch import Tensor, nn


class VAE(nn.Module):
    """Draws with randn_like, and its own loss with a KL divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1)
        return self.decoder(z), kl.mean()


class VAEDistribution(VAE):
    """The same through torch.distributions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        q = torch.distributions.Normal(mean, (0.5 * logvar).exp())
        p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(q.rsample()), torch.distributions.kl_divergence(q, p).sum(-1).mean()


class Flow(nn.Module):
    """Affine couplings with slices assigned, permutations, a log-determinant by slogdet."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            x = (x @ self.mix)[:, self.order]
            total = total + torch.slogdet(self.mix)[1]
            shift, scale = net(x[:, :4]).chunk(2, -1)
            y = x.clone()
            y[:, 4:] = x[:, 4:] * scale.tanh().exp() + shift
            total += scale.tanh().sum(-1)
            x = y
        return x, total


class ActorCritic(nn.Module):
    """A categorical policy that samples, with its log-probabilities and entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        policy = torch.distributions.Categorical(logits=self.policy(h))
        action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.value(h).squeeze(-1)

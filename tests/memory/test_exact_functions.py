"""Functions whose backward exponentiates or divides by what it saves get it as it was, under every policy."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from hf_comera import set_activation_policy

POLICIES = ["rank+fp8", "fp8"]


class Scored(nn.Module):
    """Logits of a linear layer, and a loss of them inside the model."""

    def __init__(self, loss, scale):
        super().__init__()
        self.linear, self.loss, self.scale = nn.Linear(32, 500), loss, scale

    def forward(self, x, target):
        return self.loss(self.linear(x) * self.scale, target)


def distilled(z, target):
    near = torch.softmax(z.detach() + 0.05 * target, -1)
    return functional.kl_div(functional.log_softmax(z, -1), near, reduction="batchmean")


def masked_sum(z, target):
    return torch.logsumexp(z.masked_fill(target > 1, -1e9) * 1.7, -1).sum()


def cross_entropy_by_hand(z, target):
    p, y = torch.sigmoid(z), (z.detach() > 0).float()
    return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()


def contrastive(z, target):
    z = z / z.norm(dim=-1, keepdim=True)
    return functional.cross_entropy(z @ z.T / 0.05, torch.arange(len(z)))


def near_miss(z, target):
    return functional.mse_loss(z, z.detach() + 0.01 * target)


LOSSES = {
    "distilled": (distilled, 6),
    "masked_sum": (masked_sum, 3),
    "by_hand": (cross_entropy_by_hand, 6),
    "contrastive": (contrastive, 1),
    "near_miss": (near_miss, 5),
}


def gradients(model, *inputs, **named):
    model.zero_grad()
    output = model(*inputs, **named)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_inside_a_model(name, policy):
    torch.manual_seed(0)
    model = Scored(*LOSSES[name])
    inputs = torch.randn(256, 32), torch.randn(256, 500)
    expected = gradients(model, *inputs)
    set_activation_policy(model, policy)
    assert (gradients(model, *inputs) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("policy", POLICIES)
def test_speech_with_its_loss(policy):
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, conv_dim=(32, 32),
        conv_stride=(5, 4), conv_kernel=(10, 8), vocab_size=32, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config).eval()
    inputs = {"input_values": torch.randn(8, 4000), "labels": torch.randint(1, 32, (8, 10))}
    expected = gradients(model, **inputs)
    set_activation_policy(model, policy)
    assert (gradients(model, **inputs) - expected).norm() < 0.03 * expected.norm()

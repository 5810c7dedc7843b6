"""Losses of distillation: how far embeddings, logits and hidden states of a student are from those of its teacher.

All are pure functions, zero where student and teacher agree. They return one number for each sentence or token, so
that sums over accumulated batches and processes are those of one large batch.
"""

# Shapes here: B = sentences, T = tokens of the longest, N = chosen tokens, H = hidden size, V = vocabulary or classes.

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "TopLogits",
    "class_divergence",
    "cosine_distance",
    "head_divergence",
    "hidden_difference",
    "mean_of_tokens",
    "pool",
    "similarity_difference",
    "token_divergence",
    "top_logits",
]

CHUNK_ENTRIES = 1 << 24
"""Logits at once (64 MB in float32): enough tokens for products at full speed."""

TopLogits = tuple[Tensor, Tensor, Tensor]
"""Of a teacher, for each token: ids ``(N, k)`` and their log shares, and the log share ``(N,)`` of all the others."""


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """One embedding for each sentence.

    Args:
        hidden: Hidden states of the last layer.
        mask: 1 for tokens, 0 for padding on either side; None where nothing is padding.
        pooling: ``"mean"`` over the tokens, or ``"cls"``: the first token.

    Shape:
        ``hidden (B, T, H)``, ``mask (B, T)``; embeddings ``(B, H)``, in float32 at least.
    """
    hidden = _exact(hidden)
    if pooling == "mean":
        return mean_of_tokens(hidden, mask)
    if mask is None:
        return hidden[:, 0]
    return hidden[torch.arange(len(hidden), device=hidden.device), (mask != 0).long().argmax(1)]


def mean_of_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over axis 1 of what is not padding; what stands at padding, even NaN, does not matter.

    Shape:
        ``values (B, T, ...)``, ``mask (B, T)``; means ``(B, ...)``.
    """
    if mask is None:
        return values.mean(1)
    is_token = (mask != 0).view(*mask.shape, *[1] * (values.dim() - 2))
    return torch.where(is_token, values, 0).sum(1) / is_token.sum(1).clamp_min(1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """``1 - cos`` of two embeddings of the same sentence.

    Shape:
        twice ``(B, H) -> (B,)``.
    """
    return 1 - torch.nn.functional.cosine_similarity(_exact(student), _exact(teacher), dim=-1)


def similarity_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared error of the cosines of each sentence with all other sentences of the batch; 0 for one sentence.

    Shape:
        twice ``(B, H) -> (B,)``.

    Source:
        "Similarity-preserving knowledge distillation", arXiv:1907.09682, section 3.
    """
    cosines = [embeddings @ embeddings.mT for embeddings in map(_unit, (student, teacher))]
    squares = (cosines[0] - cosines[1]).square()
    return (squares.sum(1) - squares.diagonal()) / max(len(squares) - 1, 1)


def hidden_difference(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """``|h - h'|^2 / |h|^2``, the mean over layers and over the tokens of each sentence; ``h`` is the teacher's.

    Args:
        student: Hidden states of each layer.
        teacher: The same of the teacher.
        mask: 1 for tokens, 0 for padding; None where nothing is padding.

    Shape:
        twice a sequence of ``(B, T, H)``, ``mask (B, T)``; differences ``(B,)``.
    """
    total: Tensor | float = 0.0
    for ours, wanted in zip(student, teacher, strict=True):
        wanted = _exact(wanted)
        errors = (_exact(ours) - wanted).square().sum(-1)
        errors = errors / wanted.square().sum(-1).clamp_min(torch.finfo(wanted.dtype).eps)
        total = total + mean_of_tokens(errors, mask)
    assert isinstance(total, Tensor)
    return total / len(student)


def class_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of the teacher's classes from the student's, times ``temperature**2``.

    Shape:
        logits, twice ``(..., V) -> (...)``.

    Source:
        Hinton et al., "Distilling the knowledge in a neural network", arXiv:1503.02531, section 2 (also the factor).
    """
    ours, wanted = (torch.log_softmax(_exact(logits) / temperature, -1) for logits in (student, teacher))
    divergence = torch.nn.functional.kl_div(ours, wanted, reduction="none", log_target=True).sum(-1)
    return divergence * temperature**2


def top_logits(teacher: Tensor, top_k: int, temperature: float = 1.0) -> TopLogits:
    """The ``top_k`` likeliest tokens of a teacher, their log shares, and the log share of all others as one class.

    Shape:
        logits ``(N, V)``; ids and log shares ``(N, k)`` with ``k = min(top_k, V)``, the rest ``(N,)``.
    """
    logits = _exact(teacher) / temperature
    top, ids = logits.topk(min(top_k, logits.shape[-1]), -1)
    total = logits.logsumexp(-1)
    return ids, top - total[:, None], _log_rest(logits, ids) - total


def token_divergence(student: Tensor, top: TopLogits, temperature: float = 1.0) -> Tensor:
    """Kullback-Leibler divergence over ``k + 1`` classes, the teacher's top tokens and the rest, times
    ``temperature**2``.

    Args:
        student: Logits.
        top: Of the teacher, by :func:`top_logits` at the same temperature.
        temperature: Logits are divided by it.

    Shape:
        ``student (N, V) -> (N,)``.
    """
    ids, wanted, wanted_rest = top
    logits = _exact(student) / temperature
    total = logits.logsumexp(-1)
    ours = logits.gather(-1, ids) - total[:, None]
    divergence = (wanted.exp() * (wanted - ours)).sum(-1)
    if ids.shape[-1] < logits.shape[-1]:
        divergence = divergence + wanted_rest.exp() * (wanted_rest - (_log_rest(logits, ids) - total))
    return divergence * temperature**2


def head_divergence(
    student: Tensor,
    student_head: Callable[[Tensor], Tensor],
    teacher: Tensor,
    teacher_head: Callable[[Tensor], Tensor],
    vocabulary: int,
    *,
    top_k: int = 64,
    temperature: float = 1.0,
) -> Tensor:
    """:func:`token_divergence` from hidden states, a chunk of tokens at a time: no logits are kept.

    Backward computes the student's logits once more. The teacher's are computed once, without gradients.

    Args:
        student: What the student's head takes, of the chosen tokens.
        student_head: From it to logits.
        teacher: What the teacher's head takes.
        teacher_head: From it to logits.
        vocabulary: Number of logits of a token.
        top_k: How many tokens are compared one by one.
        temperature: Logits are divided by it.

    Shape:
        ``student (N, H)``, ``teacher (N, H')``; divergences ``(N,)``.
    """

    def divergence(hidden: Tensor, *top: Tensor) -> Tensor:
        return token_divergence(student_head(hidden), top, temperature)  # type: ignore[arg-type]

    size = max(1, CHUNK_ENTRIES // vocabulary)
    parts = []
    for ours, wanted in zip(student.split(size), teacher.split(size), strict=True):
        with torch.no_grad():
            top = top_logits(teacher_head(wanted), top_k, temperature)
        parts.append(checkpoint(divergence, ours, *top, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts)


def _exact(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _unit(embeddings: Tensor) -> Tensor:
    return torch.nn.functional.normalize(_exact(embeddings), dim=-1)


def _log_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """``logsumexp`` of all but ``ids``; without the difference of nearly equal numbers that ``1 - share`` would be."""
    return logits.scatter(-1, ids, -torch.inf).logsumexp(-1)

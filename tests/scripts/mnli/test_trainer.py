"""scripts/mnli/trainer.py: the kept model is the most accurate so far, of equals the one with the lower loss."""

import errno
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, TrainerState

from mnli.trainer import ACCURACY, LOSS, BestModel, figures

CASES = [  # (accuracy, loss) as measured one after the other, the first step that counts, and which is kept
    pytest.param([(0.5, 1.0), (0.6, 1.1), (0.55, 0.9)], 0, 1, id="accuracy-counts-first"),
    pytest.param([(0.5, 1.1), (0.5, 1.0), (0.5, 1.05)], 0, 1, id="then-the-loss"),
    pytest.param([(0.5, 1.0), (0.5, 1.0)], 0, 0, id="then-the-earliest"),
    pytest.param([(0.5, 1.0), (0.5, float("nan"))], 0, 0, id="not-a-number-is-never-better"),
    pytest.param([(0.9, 0.5), (0.6, 1.0), (0.5, 1.1)], 10, 1, id="too-large-models-do-not-count"),
]


def state(measured):
    log = [{"step": 10 * n, ACCURACY: accuracy, LOSS: loss} for n, (accuracy, loss) in enumerate(measured)]
    last = log[-1]["step"]
    return TrainerState(log_history=[{"step": 0, "loss": 3.0}, *log], global_step=last, is_world_process_zero=True)


@pytest.mark.parametrize(("measured", "first", "kept"), CASES)
def test_kept_model(measured, first, kept, tmp_path):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=10, **shape))
    best = BestModel(tmp_path / "best", first)
    for number in range(len(measured)):
        model.classifier.bias.data.fill_(number)
        best.on_evaluate(None, state(measured[: number + 1]), None, model=model)
    assert best.step(state(measured)) == 10 * kept
    assert BertForSequenceClassification.from_pretrained(tmp_path / "best").classifier.bias[0] == kept
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert best.kept() == tmp_path / "best"
    shutil.rmtree(tmp_path / "best")
    with pytest.raises(ValueError, match="the output folder was removed while the run went on"):
        best.kept()


def test_a_full_disk_leaves_nothing(tmp_path):
    def save_pretrained(folder):
        folder.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    model = SimpleNamespace(save_pretrained=save_pretrained)
    with pytest.raises(OSError, match="No space left"):
        BestModel(tmp_path / "best").on_evaluate(None, state([(0.5, 1.0)]), None, model=model)
    assert not list(tmp_path.iterdir())


def test_figures_are_means_over_all_pairs():
    logits = np.random.default_rng(0).normal(size=(29, 3)).astype(np.float32)
    labels = np.arange(29) % 3
    measured = figures(EvalPrediction(predictions=logits, label_ids=labels))
    assert measured["accuracy"] == sum(row.argmax() == label for row, label in zip(logits, labels, strict=True)) / 29
    shares = torch.from_numpy(logits).double().log_softmax(-1)[torch.arange(29), torch.from_numpy(labels)]
    assert measured["held_out_loss"] == pytest.approx(-shares.mean().item(), rel=1e-12)

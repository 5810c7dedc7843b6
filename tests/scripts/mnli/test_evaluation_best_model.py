"""scripts/mnli/evaluation.py: the kept model is the most accurate so far, of equals the one with the lower loss."""

import errno
import shutil
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

from loop.train import History
from mnli.evaluation import BestModel

CASES = [  # (accuracy, loss) as measured one after the other, the first step that counts, and which is kept
    pytest.param([(0.5, 1.0), (0.6, 1.1), (0.55, 0.9)], 0, 1, id="accuracy-counts-first"),
    pytest.param([(0.5, 1.1), (0.5, 1.0), (0.5, 1.05)], 0, 1, id="then-the-loss"),
    pytest.param([(0.5, 1.0), (0.5, 1.0)], 0, 0, id="then-the-earliest"),
    pytest.param([(0.5, 1.0), (0.5, float("nan"))], 0, 0, id="not-a-number-is-never-better"),
    pytest.param([(0.9, 0.5), (0.6, 1.0), (0.5, 1.1)], 10, 1, id="too-large-models-do-not-count"),
]


@pytest.mark.parametrize(("measured", "first", "kept"), CASES)
def test_kept_model(measured, first, kept, tmp_path):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=10, **shape))
    history = History(figures={"accuracy": []})
    run = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, history=history, first_choice=first, step=0)
    best = BestModel(tmp_path / "best")
    for number, (accuracy, loss) in enumerate(measured):
        model.classifier.bias.data.fill_(number)
        run.history.held_out.append((10 * number, loss))
        run.history.figures["accuracy"].append((10 * number, accuracy))
        run.step = 10 * number
        best.consider(run)
    assert best.step(run) == 10 * kept
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

    history = History(figures={"accuracy": [(0, 0.5)]}, held_out=[(0, 1.0)])
    model = SimpleNamespace(save_pretrained=save_pretrained)
    accelerator = SimpleNamespace(is_main_process=True, unwrap_model=lambda model: model)
    run = SimpleNamespace(accelerator=accelerator, model=model, history=history, first_choice=0, step=0)
    with pytest.raises(OSError, match="No space left"):
        BestModel(tmp_path / "best").consider(run)
    assert not list(tmp_path.iterdir())

"""hf_comera/compress/reports.py: ranks before and after as a table and a picture, with the true sizes."""

import copy
import sys

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, add_rank_gates, get_comera_model, rank_report, size_report
from hf_comera.compress.reports import RankHistory, RankReport
from hf_comera.modules import TTLinear, TTMEmbedding
from hf_comera.training.ranks.pruning import cut_ranks
from tests.architectures import ARCHITECTURES

REPORT = RankReport(
    before={"embedding": (12, 30, 30), "a.query": (4, 8, 8, 8, 4), "a.key": (4, 8, 8, 8, 4), "one_core": ()},
    after={"embedding": (12, 7, 5), "a.query": (1, 2, 3, 2, 1), "a.key": (0, 0, 0, 0, 0), "one_core": ()},
    parameters=1234,
    dense_parameters=123_400,
    steps=(0, 10, 20),
    sizes=(5678, 2000, 1234),
)


def small_model():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embedding": TTMEmbedding(57, 11, ranks=4),
            "query": TTLinear(7, 30, ranks=4),
            "key": TTLinear(7, 30, ranks=4),
            "head": nn.Linear(11, 3),
        }
    )


def cells(report):
    """Rows of the printed table, without its frame."""
    lines = [[part.strip() for part in line.replace("┃", "│").split("│")] for line in str(report).splitlines()]
    return [line for line in lines if len(line) == 3]


def test_the_table_has_a_row_per_layer_and_names_removed_ones():
    assert cells(REPORT) == [
        ["layer", "before", "after"],
        ["embedding", "12 30 30", "12 7 5"],
        ["a.query", "4 8 8 8 4", "1 2 3 2 1"],
        ["a.key", "4 8 8 8 4", "removed"],
        ["one_core", "", ""],
    ]
    assert "1,234 parameters, 100.0x below dense; 5,678 when rank adaptation began" in " ".join(str(REPORT).split())


def test_without_a_history_nothing_has_changed():
    report = rank_report(small_model())
    assert report.before == report.after
    assert list(report.after) == ["embedding", "query", "key"]
    assert (report.steps, report.sizes) == ((), ())
    assert "when rank adaptation began" not in str(report)


def test_sizes_are_those_of_the_model_without_gates():
    model = small_model()
    plain = size_report(model)
    add_rank_gates(model)
    report = rank_report(model)
    assert (report.parameters, report.dense_parameters) == (plain.parameters, plain.dense_parameters)
    cut_ranks(dict(model.items()), {"query": [torch.arange(0)] * 5})
    report = rank_report(model)
    assert report.parameters == plain.parameters - rank_entries(small_model()["query"])
    assert report.dense_parameters == plain.dense_parameters
    assert report.after["query"] == (0,) * 5


def rank_entries(layer):
    return sum(core.numel() for core in layer.cores())


def test_the_history_is_kept_by_the_model_and_its_copies():
    model = small_model()
    ranks = {"query": [9, 9, 9, 9, 9]}
    model.__dict__["_rank_history"] = RankHistory(ranks_before=ranks, steps=[0, 4], parameters=[900, 800])
    for each in (model, copy.deepcopy(model)):
        report = rank_report(each)
        assert report.before == {**report.after, "query": (9,) * 5}
        assert (report.steps, report.sizes) == ((0, 4), (900, 800))


def test_compressed_models_have_it_as_a_method():
    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    assert model.rank_report() == rank_report(model)
    assert len(model.rank_report().after) == architecture.num_layers


@pytest.mark.parametrize("steps", [(), (0, 10, 20)], ids=["maps-only", "with-curve"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_are_written(steps, ending, tmp_path):
    pytest.importorskip("matplotlib")
    report = RankReport(**{**vars(REPORT), "steps": steps, "sizes": (5678, 2000, 1234)[: len(steps)]})
    path = tmp_path / f"ranks.{ending}"
    assert report.plot(str(path)) == path
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 5000


def test_pictures_name_every_layer_and_rank(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        text = REPORT.plot(tmp_path / "ranks.svg").read_text()
    for label in ("ranks before", "ranks after", "embedding", "a.query", "a.key", ">30<", ">7<", "parameters"):
        assert label in text


def test_ranks_that_did_not_change_are_drawn_once(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    ranks = {"a.query": (3, 11)}
    with rc_context({"svg.fonttype": "none"}):
        report = RankReport(before=ranks, after=ranks, parameters=1, dense_parameters=1)
        text = report.plot(tmp_path / "ranks.svg").read_text()
    assert (text.count(">11<"), text.count(">a.query<")) == (1, 1)
    assert "before" not in text


def test_pictures_of_removed_models_and_of_many_layers(tmp_path):
    pytest.importorskip("matplotlib")
    for ranks in ({"only": (0, 0, 0)}, {"one_core": ()}, {f"layer.{number}": (number, 3) for number in range(70)}):
        RankReport(before=ranks, after=ranks, parameters=1, dense_parameters=1).plot(tmp_path / "ranks.png")


def test_a_dense_model_has_no_picture(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no layer in tensor-train form to draw"):
        rank_report(nn.Linear(3, 3)).plot(tmp_path / "ranks.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'RankReport\.plot needs matplotlib: pip install "hf_comera\[plots\]"'):
        REPORT.plot(tmp_path / "ranks.png")
    assert not list(tmp_path.iterdir())

"""`./bench cache-kvpress`: perplexity after one eviction, ours and kvpress's where it is installed."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cache_kvpress
from benchmarks.cache_kvpress import Rule
from regard.cache import Knorm, SinksAndRecent
from tests.integrate.writing import on_regard
from tests.integrate.zoo import tokens

RULE = Rule(Knorm(8, sinks=0, recent=0), "SmallKeys", {"kept": 8})


class SmallKeys:
    """The rule of kvpress's KnormPress, by its words."""

    def __init__(self, compression_ratio: float, kept: int) -> None:
        self.kept = kept
        assert compression_ratio == 0.5

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, weights: Any, message: Any) -> Any:
        index = (-keys.norm(dim=-1)).topk(self.kept, dim=-1).indices[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, index), values.gather(2, index)


def test_without_eviction_the_rest_is_predicted_as_in_one_pass():
    made, ids = on_regard("llama"), tokens(1, 33)
    with torch.no_grad():
        logits = made(ids[:, :-1]).logits[0, 15:]
    expected = float(torch.nn.functional.cross_entropy(logits, ids[0, 16:]))
    assert cache_kvpress.ours(made, None, ids, 16) == pytest.approx(expected, rel=1e-5)
    assert cache_kvpress.ours(made, SinksAndRecent(8), ids, 16) != pytest.approx(expected, rel=1e-4)


def test_a_press_of_the_same_rule_predicts_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(SmallKeys=SmallKeys))
    monkeypatch.setattr(cache_kvpress, "version", lambda: "1.0")
    made, ids = on_regard("llama"), tokens(2, 33)
    plain, found = cache_kvpress.measured(made, ids, 16, [RULE], lambda line: None)
    (own, peer), *_ = found.values()
    assert peer is not None
    assert own == pytest.approx(peer, rel=1e-5)
    assert abs(own - plain) > 1e-3
    assert cache_kvpress.results_table(found).endswith(f"| {own:.2f} | {peer:.2f} |")


def test_where_kvpress_is_not_installed_its_column_is_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_kvpress, "version", lambda: None)
    _, found = cache_kvpress.measured(on_regard("llama"), tokens(1, 33), 16, [RULE], lambda line: None)
    assert cache_kvpress.results_table(found).endswith("|  |")
    assert math.isfinite(next(iter(found.values()))[0])

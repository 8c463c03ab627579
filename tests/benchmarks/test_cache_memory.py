"""`./bench cache-memory`: what a prompt costs the process, cache by cache."""

import pytest

from benchmarks import cache_memory
from benchmarks.cache_memory import KINDS, Growth


@pytest.mark.exhaustive
def test_a_cache_is_measured_in_a_process_of_its_own():
    found = cache_memory.measured(KINDS[2], tokens=301, layers=1)
    assert found.stored == (301 + cache_memory.STEPS) * 2 * 3 * 64 * 4


def test_the_page_gets_a_row_for_each_cache(monkeypatch, tmp_path):
    (tmp_path / "caches.md").write_text("A\n<!-- begin memory -->\nthe old text\n<!-- end memory -->\nZ\n")
    growth = Growth(5 << 20, 3 << 20, 2 << 20, 1 << 20)
    monkeypatch.setattr(cache_memory, "measured", lambda kind, threads, runs: growth)
    assert cache_memory.main(["--write", str(tmp_path)]) == 0
    page = (tmp_path / "caches.md").read_text()
    assert page.startswith("A\n<!-- begin memory -->\n\nMeasured by `./bench cache-memory` on ")
    assert "the old text" not in page
    assert all(f"| {kind.name} | 5 | 3 | 2 | 1 |" in page for kind in KINDS)


def test_some_rows_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(cache_memory, "measured", lambda kind, threads, runs: Growth(1, 1, 1, 1))
    assert cache_memory.main(["--only", "snap"]) == 0
    assert capsys.readouterr().out.count("\n") == 3

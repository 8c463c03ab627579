"""Parts of pages that commands write, between marks."""

import pytest

from benchmarks import command
from benchmarks.page_parts import with_part, write_part
from regard.errors import ProblemError


def test_a_part_replaces_what_stood_between_its_marks_alone(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A\n<!-- begin x -->\nold\n<!-- end x -->\nby hand\n<!-- begin y -->\n<!-- end y -->\n")
    once = with_part(page, "x", "new\n")
    assert once == "# A\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nby hand\n<!-- begin y -->\n<!-- end y -->\n"
    write_part(page, "x", "new", {"a.svg": "<svg/>"})
    assert page.read_text() == once
    assert with_part(page, "x", "new") == once
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


def test_a_page_without_the_marks_is_left_as_it_is(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("<!-- begin x -->")
    with pytest.raises(ProblemError, match=r"a\.md has no part between <!-- begin x --> and <!-- end x -->"):
        write_part(page, "x", "new", {"a.svg": "<svg/>"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


def test_a_page_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(ProblemError, match=r"there is no .*a\.md"):
        write_part(tmp_path / "a.md", "x", "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("page", "name"), [("caches.md", "speed"), ("caches.md", "quality"), ("inspect.md", "cost")])
def test_the_pages_in_the_repository_have_their_parts(page, name):
    page = command.DOCS / page
    assert with_part(page, name, "new") != page.read_text()

"""Where commands write: never onto what they read, onto files of others only by force, and whole or not at all."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.atomic_write import atomic_write, check_writable, write_whole
from regard.cli import outputs
from regard.cli.main import main
from regard.cli.outputs import SIGNATURES, as_json
from regard.inspect.page import page
from regard.integrate.checkpoint import folder_of
from tests.cli import tiny
from tests.cli.surveyed import Surveyed
from tests.inspect.reports import report

THEIRS = "Call me Ishmael."
FORMS = {"--html": "page", "--json": "JSON", "--csv": "table"}


def inspected(*arguments, **tools):
    """The exit code of `regard inspect`; a model that is loaded in spite of an error is one itself."""
    return main(["inspect", *map(str, arguments)], tools=Surveyed(**tools))


def refused(capsys, *arguments):
    """The line that says why nothing was loaded and nothing written."""
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
    assert inspected(*arguments, loads=lambda name: pytest.fail("it is loaded")) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()} == before
    return err


@pytest.fixture
def thesis(here):
    (here / "thesis.txt").write_text(THEIRS)
    return here / "thesis.txt"


# ---- what is read ---------------------------------------------------------------------------------------------------


def by_a_link(thesis):
    (thesis.parent / "link.html").symlink_to(thesis)
    return "link.html"


def by_a_second_name(thesis):
    (thesis.parent / "second.html").hardlink_to(thesis)
    return "second.html"


def by_a_detour(thesis):
    (thesis.parent / "folder").mkdir()
    return "folder/../thesis.txt"


@pytest.mark.parametrize("option", FORMS)
@pytest.mark.parametrize("name", [lambda thesis: thesis, by_a_link, by_a_second_name, by_a_detour])
def test_the_text_is_not_written_to_not_even_by_force(name, option, thesis, capsys):
    place = name(thesis)
    message = refused(capsys, "--prompt-file", "thesis.txt", option, place, "--force")
    assert f"{place} is the prompt that is read: name another file after {option}." in message


def test_the_text_on_stdin_is_not_written_to(thesis, capsys, monkeypatch):
    with thesis.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert "is the prompt that is read" in refused(capsys, "-", "--html", "thesis.txt", "--force")


def test_a_page_that_is_read_as_a_text_is_not_written_to(here, capsys):
    assert inspected("a b") == 0
    assert "regard.html is the prompt that is read" in refused(capsys, "--prompt-file", "regard.html")


@pytest.mark.parametrize("which", ["--model", "--compare-model"])
def test_the_files_of_a_model_are_not_written_to_not_even_by_force(which, here, capsys):
    model = here / "models" / "one"
    (model / "more").mkdir(parents=True)
    (here / "alias").symlink_to(model)
    for file in ("model.safetensors", "config.json", "more/tokenizer.json"):
        (model / file).write_text("{}")
        for place in (model / file, f"alias/{file}"):
            message = refused(capsys, which, "models/one", "--json", place, "--force")
            assert f"{place} is a file of the model that is read" in message
    assert inspected(which, model, "--html", model / "regard.html") == 0
    assert inspected(which, model, "--html", model / "regard.html") == 0


def test_a_model_in_the_cache_is_known_by_its_name(here, capsys, monkeypatch):
    import huggingface_hub.constants

    hub = here / "hub" / "models--we--tiny"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "0f3a").write_text("{}")
    (hub / "snapshots" / "abc").mkdir(parents=True)
    (hub / "snapshots" / "abc" / "config.json").symlink_to(hub / "blobs" / "0f3a")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(here / "hub"))
    message = refused(capsys, "--model", "we/tiny", "--json", hub / "blobs" / "0f3a", "--force")
    assert "is a file of the model that is read" in message


@pytest.mark.parametrize("name", ["", "no name!", "owner/none", "./nowhere"])
def test_a_model_that_is_not_here_has_no_folder(name):
    assert folder_of(name) is None


# ---- what others wrote ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", FORMS)
def test_a_file_of_others_is_replaced_by_force_alone(option, thesis, capsys):
    message = refused(capsys, option, thesis)
    assert f"thesis.txt exists, and is no {FORMS[option]} that regard wrote: name another file after" in message
    assert inspected(option, thesis, "--force") == 0
    assert SIGNATURES[FORMS[option]].match(thesis.read_bytes())
    assert inspected(option, thesis) == 0


def test_a_file_of_regards_in_another_form_is_one_of_others(here, capsys):
    assert inspected("--csv", "heads.csv", "--json", "heads.json") == 0
    assert "regard.html exists, and is no table" in refused(capsys, "--html", "x.html", "--csv", "regard.html")
    assert "heads.csv exists, and is no JSON" in refused(capsys, "--json", "heads.csv")
    assert "heads.json exists, and is no page" in refused(capsys, "--html", "heads.json")


def test_an_empty_file_and_a_device_lose_nothing(here):
    (here / "made.html").touch()
    assert inspected("--html", "made.html", "--json", os.devnull) == 0
    assert (here / "made.html").stat().st_size > 10_000


def test_a_link_stays_and_what_it_leads_to_is_written(here):
    (here / "folder").mkdir()
    (here / "link.html").symlink_to(here / "folder" / "page.html")
    for _ in range(2):
        assert inspected("--html", "link.html") == 0
    assert (here / "link.html").is_symlink()
    assert (here / "folder" / "page.html").stat().st_size > 10_000


def test_one_file_by_two_names_is_not_for_two(here, capsys):
    assert inspected("--json", "a.json") == 0
    (here / "b.json").hardlink_to(here / "a.json")
    assert "--json and --csv name the same file" in refused(capsys, "--json", "a.json", "--csv", "./a.json", "--force")
    assert "--json and --csv name the same file" in refused(capsys, "--json", "a.json", "--csv", "b.json", "--force")


@pytest.mark.parametrize("place", ["x" * 300, "a\0b", "loop"])
def test_a_name_that_no_file_can_have_is_reported_in_one_line(place, here, capsys):
    (here / "loop").symlink_to(here / "loop")
    assert "cannot be written: " in refused(capsys, "--html", place)


def test_what_regard_writes_is_known_by_its_beginning():
    made = report(model="a" * 5000, other=report(model="<b>"))
    assert SIGNATURES["page"].match(page(made)[:1024].encode())
    assert SIGNATURES["JSON"].match(as_json(made.to_dict()).encode())
    assert SIGNATURES["table"].match(made.to_csv().encode())


# ---- the other commands ---------------------------------------------------------------------------------------------


BENCH = ["bench", "--queries", "16", "--query-heads", "1", "--rounds", "1"]


def test_a_measurement_replaces_its_own_file_and_no_other(here, thesis, capsys):
    for _ in range(2):
        assert main([*BENCH, "--json", "speed.json"]) == 0
    assert json.loads((here / "speed.json").read_text())["pairs"] == 256
    capsys.readouterr()
    assert main([*BENCH, "--json", "thesis.txt"]) == 2
    assert "thesis.txt exists, and is no JSON that regard wrote" in capsys.readouterr().err
    assert thesis.read_text() == THEIRS
    assert main([*BENCH, "--json", "thesis.txt", "--force"]) == 0


def test_what_a_model_writes_replaces_its_own_file_and_no_other(here, thesis, capsys, monkeypatch):
    tiny.save(here / "model")
    written = ["generate", "Call me", "--max-new-tokens", "3", "--model", "model"]
    for _ in range(2):
        assert main([*written, "--json", "written.json"]) == 0
    monkeypatch.setattr("regard.integrate.checkpoint.load", lambda *_: pytest.fail("it is loaded"))
    capsys.readouterr()
    for more, message in (
        (["--json", "thesis.txt"], "no JSON that regard wrote"),
        (["--json", "model/config.json", "--force"], "is a file of the model"),
        (["--json", "model/model.safetensors", "--force"], "is a file of the model"),
    ):
        assert main([*written, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", "--prompt-file", "thesis.txt", "--json", "thesis.txt", "--force"]) == 2
    assert "is the prompt that is read" in capsys.readouterr().err
    assert thesis.read_text() == THEIRS


# ---- whole or not at all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", FORMS)
def test_a_disk_that_is_full_leaves_what_was_there(option, here, capsys, monkeypatch):
    place = here / "made"
    assert inspected(option, place) == 0
    before = place.read_bytes()
    write = Path.write_bytes

    def full(path, data):
        if path.name.startswith(".made."):
            path.touch()
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert inspected(option, place, "--force") == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert place.read_bytes() == before
    assert {path.name for path in here.iterdir()} <= {"made", "regard.html"}


def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, running = (tmp_path / f".a+b.json.{process}.3.part" for process in (gone.pid, os.getppid()))
    others = [tmp_path / name for name in (".aab.json.1.3.part", ".a+b.json.part", "a+b.json.1.3.part")]
    for path in (left, running, *others):
        path.touch()
    write_whole(tmp_path / "a+b.json", b"{}")
    assert {*tmp_path.iterdir()} == {tmp_path / "a+b.json", running, *others}


def test_an_error_names_the_file_asked_for(tmp_path: Path):
    """Also where the temporary file can be neither made nor removed, or not be renamed."""
    nowhere, folder = tmp_path / "none" / "x", tmp_path / "folder"
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(nowhere, b"{}")
    assert raised.value.filename == str(nowhere)
    with pytest.raises(OSError, match=r"folder'$"), atomic_write(folder) as part:  # noqa: PT012
        part.write_bytes(b"{}")
        folder.mkdir()
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("name", ["x" * 250 + ".html", "x" + "ä" * 127])
def test_the_longest_names_can_be_written(name: str, tmp_path: Path):
    """The name of the temporary file is no longer, and is found again after a process was killed."""
    check_writable(tmp_path / name)
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / name) as part:
        raise KeyboardInterrupt
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    part.with_name(part.name.replace(f".{os.getpid()}.", f".{gone.pid}.")).touch()
    write_whole(tmp_path / name, b"{}")
    assert [*tmp_path.iterdir()] == [tmp_path / name]


def test_threads_that_write_the_same_file_leave_a_whole_one(tmp_path: Path):
    path = tmp_path / "made"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"  # renamed last
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tmp_path: Path):
    path, other = tmp_path / "made", tmp_path / "other"
    other.touch()
    write_whole(path, b"{}")
    assert path.stat().st_mode == other.stat().st_mode
    path.chmod(mode)
    with atomic_write(path) as part:
        assert part.stat().st_mode & 0o777 == mode | 0o600
        part.write_bytes(b"[]")
    assert (path.stat().st_mode & 0o777, path.read_bytes()) == (mode, b"[]")


def test_stdout_is_no_file():
    assert outputs.output_files(("--json", "-", "JSON"), ("--csv", None, "table"), ("--html", "x", "page")) == [
        ("--html", "x", "page")
    ]

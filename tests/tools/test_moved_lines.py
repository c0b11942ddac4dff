"""A recorded line of an engine's source is found in another release, or the tool says what became of it."""

import pytest

from tools import moved_lines

CODE = """FIRST = 1
ORDER: list[str] = [
    "deepgemm",
    "cutlass",
]


class Backend:
    def choose(self, m):
        if m < 32:
            return "small"
        return "large"


def same(): return 1
"""
TOML = """# What it runs, read in its wheel.
version = "1.0"

[[default]]
row = "cutlass"
file = "vllm/order.py"
line = 4
function = "ORDER"
why = "x"

[[default]]
file = "vllm/order.py"
line = 11
function = "Backend.choose"
"""


@pytest.fixture
def tell(tmp_path, capsys):
    """Returns the exit code and the lines for the text of a file in a new release and, if given, in an old
    one."""
    (tmp_path / "kernels" / "engines").mkdir(parents=True)
    (tmp_path / "kernels" / "engines" / "vllm.toml").write_text(TOML)

    def release(name, text):
        package = tmp_path / name / "vllm"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "version.py").write_text(f'__version__ = "{name}"')
        if text is not None:
            (package / "order.py").write_text(text)
        return str(tmp_path / name)

    def told(text, *more, old="1.0", was=CODE):
        given = ["vllm", release("1.1", text), *(["--from", release(old, was)] if old else []), *more]
        code = moved_lines.main(given, tmp_path)
        return code, capsys.readouterr().out.splitlines()

    told.toml = tmp_path / "kernels" / "engines" / "vllm.toml"
    return told


def test_all_in_place(tell):
    assert tell(CODE) == (0, ["vllm 1.1: 2 of 2 lines in their place"])


def test_lines_that_moved_are_named_and_written(tell):
    entries = [
        "kernels/engines/vllm.toml:7: vllm/order.py:4 ORDER: moved to line 6",
        "kernels/engines/vllm.toml:13: vllm/order.py:11 Backend.choose: moved to line 13",
    ]
    end = "vllm 1.1: 0 of 2 lines in their place"
    before = tell.toml.read_text()
    assert tell("import a\n\n" + CODE) == (1, [*entries, end])
    assert tell.toml.read_text() == before
    tell("import a\n\n" + CODE, "--write")
    assert tell.toml.read_text() == before.replace("line = 4\n", "line = 6\n").replace(
        "line = 11\n", "line = 13\n"
    )


def test_a_function_that_changed_is_reported_and_not_written(tell):
    before = tell.toml.read_text()
    code, lines = tell(CODE.replace("        if m < 32:", "        m += 1\n        if m < 16:"), "--write")
    assert code == 1 and lines == [
        "kernels/engines/vllm.toml:13: vllm/order.py:11 Backend.choose: "
        "its function changed, and the line is now 12",
        "vllm 1.1: 1 of 2 lines in their place",
    ]
    assert tell.toml.read_text() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CODE.replace("choose", "pick"), "its function is gone"),
        (CODE.replace('"small"', '"tiny"'), "its function changed, and the line too"),
        (CODE + "def broken(:\n", "its file cannot be parsed by this Python, line 16"),
        (None, "its file is gone"),
    ],
)
def test_what_is_gone_or_changed(tell, text, said):
    code, lines = tell(text)
    assert code == 1
    assert f"kernels/engines/vllm.toml:13: vllm/order.py:11 Backend.choose: {said}" in lines


def test_without_the_old_release_a_line_need_only_lie_within_its_function(tell):
    assert tell("import a\n" + CODE, old="") == (0, ["vllm 1.1: 2 of 2 lines in their place"])
    code, lines = tell("import a\n" * 4 + CODE, old="")
    assert code == 1
    assert lines[0] == "kernels/engines/vllm.toml:7: vllm/order.py:4 ORDER: its function begins at line 6"


def test_writing_needs_the_release_that_was_read(tell, capsys):
    with pytest.raises(SystemExit):
        tell(CODE, "--write", old="")
    assert (
        "--from takes the release that kernels/engines/vllm.toml names, and --write needs it"
        in capsys.readouterr().err
    )


def test_every_entry_is_found_in_its_file():
    for engine in ("sglang", "vllm"):
        text = (moved_lines.ROOT / "kernels" / "engines" / f"{engine}.toml").read_text()
        assert len([*moved_lines.entries(text)]) == text.count("[[default]]")

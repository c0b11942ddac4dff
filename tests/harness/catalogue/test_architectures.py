"""GPUs and architectures by the words that users have for them."""

import pytest

from harness.catalogue.architectures import named_architecture, named_sheet, select_architectures
from harness.errors import UsageError


@pytest.mark.parametrize(("word", "arch", "name"), [
    ("MI300X", "gfx942", "MI300X"), ("mi325x", "gfx942", "MI325X"), ("MI350X", "gfx950", "MI350X"),
    ("MI355X", "gfx950", "MI355X"), ("h100", "sm_90", "H100"), ("H200", "sm_90", "H200"),
    ("B200", "sm_100", "B200"), ("B300", "sm_103", "B300"), ("AMD Instinct MI300X", "gfx942", "MI300X"),
    ("gfx942", "gfx942", "MI300X"), ("SM_90", "sm_90", "H200"), ("sm_103", "sm_103", "B300"),
    ("sm_120", "sm_120", None), ("x86-amx", "x86-amx", None),
])  # fmt: skip
def test_a_word_names_an_architecture_and_its_usual_gpu(word, arch, name):
    assert named_architecture(word) == arch
    assert (named_sheet(word) or {}).get("name") == name


def test_targets_are_gpus_too_and_each_counts_once():
    assert [found.arch for found in select_architectures("H100, mi300x,sm_90")] == ["sm_90", "gfx942"]
    with pytest.raises(UsageError, match=r"^unknown architecture 'H2000'; did you mean H200"):
        select_architectures("MI300X,H2000")
